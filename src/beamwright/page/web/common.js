// Helpers of all panels: elements, numbers, colours, tooltips, and a canvas that can be moved and zoomed.

export const element = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") made.style.cssText = value; // a style attribute would violate the content security policy
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const clamp = (value, least, most) => Math.max(least, Math.min(most, value));
export const count = (number) => number.toLocaleString("en");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const shownScore = (score) => (score === null ? "none" : Math.abs(score) < 0.0005 && score !== 0 ? score.toExponential(1) : score.toFixed(3));
export const oneLine = (text) => text.replace(/\s+/g, " ").trim();
export const shortened = (text, length) => (text.length > length ? text.slice(0, length - 1) + "\u2026" : text);

export function shownSeconds(seconds) {
  if (seconds === 0) return "0";
  if (seconds >= 1) return `${Number(seconds.toPrecision(4))} s`;
  return seconds >= 1e-3 ? `${Number((seconds * 1e3).toPrecision(4))} ms` : `${Number((seconds * 1e6).toPrecision(3))} \u00b5s`;
}

export function shownBytes(bytes) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (bytes < 1024) return unit === "B" ? `${bytes} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} GiB`;
}

// --- colours -----------------------------------------------------------------------------------

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// Returns a function from a share (0 to 1) to a colour on the score ramp, and from null to null.
export function scoreColours() {
  const stops = ["score-0", "score-1", "score-2"].map((name) => channels(colour(name)));
  return (share) => {
    if (share === null) return null;
    const place = clamp(share, 0, 1) * 2;
    const [from, to] = place < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
    const part = place < 1 ? place : place - 1;
    return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * part)).join(",")})`;
  };
}

// --- tips --------------------------------------------------------------------------------------

export function showTip(event, title, text) {
  const tip = element("tip");
  tip.replaceChildren(make("b", {}, title), text);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(event.clientX + 14, 4, innerWidth - box.width - 4)}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}
export const hideTip = () => { element("tip").hidden = true; };

// --- canvases ----------------------------------------------------------------------------------

// A canvas that is redrawn when its size or the colours change, at most once per frame.
export class Drawing {
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.drawContent = draw;
    this.asked = false;
    new ResizeObserver(() => this.resized()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.ask());
  }
  get width() { return this.canvas.clientWidth; }
  get height() { return this.canvas.clientHeight; }
  resized() { this.ask(); }
  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }
  paint() {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (!width || !height) return;
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.drawContent(this.context, this.width, this.height);
  }
}

// A drawing of columns x rows, in units of its own, that can be moved and zoomed.
// margin: pixels around it. limits(width, height): {x, y: [fitting scale, largest scale]} in
// pixels per unit. xPower: exponent of the zoom in x, relative to y.
export class Viewport extends Drawing {
  constructor(canvas, draw, { margin, limits, xPower }) {
    super(canvas, draw);
    Object.assign(this, { margin, limits, xPower, world: { width: 1, height: 1 }, scale: { x: 1, y: 1 }, offset: { x: 0, y: 0 } });
    this.fitted = true;
    this.listen();
  }
  x(worldX) { return this.margin.left + worldX * this.scale.x - this.offset.x; }
  y(worldY) { return this.margin.top + worldY * this.scale.y - this.offset.y; }
  worldX(x) { return (x - this.margin.left + this.offset.x) / this.scale.x; }
  worldY(y) { return (y - this.margin.top + this.offset.y) / this.scale.y; }
  resized() { if (this.fitted) this.fit(); else this.moveBy(0, 0); }
  fit() {
    const limits = this.limits(this.width, this.height);
    this.scale = { x: limits.x[0], y: limits.y[0] };
    this.offset = { x: 0, y: 0 };
    this.fitted = true;
    const focus = this.focus?.(); // even a fitted deep tree may be wider than its panel
    if (focus) this.reveal(...focus);
    this.ask();
  }
  moveBy(dx, dy) {
    const roomX = this.width - this.margin.left - this.margin.right;
    const roomY = this.height - this.margin.top - this.margin.bottom;
    this.offset.x = clamp(this.offset.x + dx, 0, Math.max(0, this.world.width * this.scale.x - roomX));
    this.offset.y = clamp(this.offset.y + dy, 0, Math.max(0, this.world.height * this.scale.y - roomY));
    this.ask();
  }
  // Zooms around the given point. Without a point, it zooms around `focus` if that is visible, else
  // around the middle.
  zoom(factor, atX, atY) {
    if (atX === undefined) {
      const [x, y] = this.focus?.() ?? [-1, -1];
      const inSight = x >= 0 && x <= this.width && y >= 0 && y <= this.height;
      [atX, atY] = inSight ? [x, y] : [this.width / 2, this.height / 2];
    }
    const limits = this.limits(this.width, this.height);
    const [worldX, worldY] = [this.worldX(atX), this.worldY(atY)];
    this.scale.x = clamp(this.scale.x * factor ** this.xPower, limits.x[0], limits.x[1]);
    this.scale.y = clamp(this.scale.y * factor, limits.y[0], limits.y[1]);
    this.fitted = false;
    this.moveBy(this.x(worldX) - atX, this.y(worldY) - atY);
  }
  // Moves the view just far enough to make the point visible.
  reveal(x, y) {
    const [left, top] = [this.margin.left, this.margin.top];
    this.moveBy(x - clamp(x, left, this.width - this.margin.right - 40), y - clamp(y, top + 12, this.height - this.margin.bottom - 12));
  }
  listen() {
    const canvas = this.canvas;
    let from = null;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(-clamp(event.deltaY, -60, 60) * 0.01), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      from = { x: event.clientX, y: event.clientY, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (from === null) return this.onHover?.(event);
      const [dx, dy] = [from.x - event.clientX, from.y - event.clientY];
      if (!from.moved && Math.hypot(dx, dy) < 4) return;
      if (!from.moved) { canvas.setPointerCapture(event.pointerId); canvas.classList.add("dragging"); hideTip(); }
      from = { x: event.clientX, y: event.clientY, moved: true };
      this.moveBy(dx, dy);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (from !== null && !from.moved) this.onClick?.(event);
      from = null;
      canvas.classList.remove("dragging");
    });
    canvas.addEventListener("pointercancel", () => { from = null; canvas.classList.remove("dragging"); });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("keydown", (event) => {
      const plain = { "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5), 0: () => this.fit() };
      const act = this.onKey?.(event.key) ?? plain[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }
}

export function connectZoomButtons(name, viewport) {
  for (const button of document.querySelectorAll(`[data-for="${name}"] button`)) {
    const acts = { in: () => viewport.zoom(1.6), out: () => viewport.zoom(1 / 1.6), fit: () => viewport.fit() };
    button.addEventListener("click", acts[button.dataset.do]);
  }
}
