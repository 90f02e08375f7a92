// The tree on a canvas: steps from left to right, edges, labels, and the step under the pointer.

import { Viewport, clamp, colour, count, hideTip, oneLine, plural, scoreColours, shortened, showTip, shownScore } from "./common.js";
import { LARGE, layOut, named, pathOf } from "./layout.js";

const KV_PLACES = ["device", "both", "host"];

export class TreePanel {
  // colouring: fill by "score" or by "kv". threshold: steps with a lower score are drawn faded.
  // marked: the number of a step with a diamond around it.
  constructor(canvas, onSelect) {
    this.onSelect = onSelect;
    Object.assign(this, { colouring: "score", threshold: null, marked: null, selected: null });
    this.view = new Viewport(canvas, (...args) => this.draw(...args), {
      margin: { left: 26, right: 150, top: 40, bottom: 18 },
      xPower: 0.6,
      limits: (width, height) => {
        const fitX = clamp((width - 176) / Math.max(1, this.tree.depth), 24, 170);
        const fitY = Math.min((height - 58) / Math.max(1, this.layout.rows), 24);
        return { x: [fitX, Math.max(fitX, 300)], y: [fitY, 26] };
      },
    });
    this.view.onHover = (event) => this.hover(event);
    this.view.onClick = (event) => this.click(event);
    this.view.onKey = (key) => this.key(key);
    this.view.focus = () => {
      const item = this.layout.itemOf.get(this.selected);
      return item && [this.view.x(item.depth), this.view.y(item.row + 0.5)];
    };
  }
  // mode: how pruned steps are drawn: "show", "group" or "hide".
  show(tree, mode = tree.nodes.length > LARGE ? "group" : "show") {
    this.tree = tree;
    this.selected = null;
    this.setMode(mode);
  }
  setMode(mode) {
    this.mode = mode;
    this.arrange();
    this.view.fit();
  }
  // Replaces the tree by a later state of it. A view that the user has zoomed or moved is kept.
  update(tree, mode) {
    Object.assign(this, { tree, mode });
    this.arrange();
    if (this.view.fitted) this.view.fit();
  }
  arrange() {
    this.layout = layOut(this.tree, this.mode);
    this.view.world = { width: this.tree.depth, height: this.layout.rows };
    this.view.moveBy(0, 0);
  }
  // Selects a node, and opens the mark that hides it.
  select(i) {
    this.selected = i;
    if (i !== null && !this.layout.itemOf.has(i) && this.mode === "group") {
      const dead = pathOf(this.tree, i).find((node) => !node.alive);
      if (dead) this.tree.opened.add(dead.parent);
      this.arrange();
    }
    const focus = this.view.focus();
    if (focus) this.view.reveal(...focus);
    this.view.ask();
  }

  // --- the step under the pointer ---------------------------------------------------------------
  at(event) {
    let [found, nearest] = [null, 14];
    for (const item of this.layout.items) {
      const distance = Math.hypot(this.view.x(item.depth) - event.offsetX, this.view.y(item.row + 0.5) - event.offsetY);
      if (distance < nearest) [found, nearest] = [item, distance];
    }
    return found;
  }
  hover(event) {
    const item = this.at(event);
    this.view.canvas.style.cursor = item ? "pointer" : "";
    if (!item) return hideTip();
    if (!item.node) return showTip(event, plural(item.hidden, "pruned step"), `below ${named(item.parent)}, best score ${shownScore(item.best)}\nclick to show each step`);
    const { node } = item;
    if (node.parent === null) return showTip(event, named(node), plural(node.tokens, "token"));
    const facts = `${node.state}, score ${shownScore(node.score)}, ${plural(node.tokens, "token")}, ended by ${node.stop ?? "nothing yet"}`;
    showTip(event, `${node.lineage} \u00b7 round ${node.round}`, `${facts}\n\n${shortened(node.text.trim(), 360) || "(no text)"}`);
  }
  click(event) {
    const item = this.at(event);
    if (!item) return;
    hideTip();
    if (item.node) return this.onSelect(item.node.i);
    this.tree.opened.add(item.parent.i);
    this.arrange();
  }
  key(key) {
    const item = this.layout.itemOf.get(this.selected);
    const go = (to) => (to ? () => this.onSelect(to.node.i) : undefined);
    if (!item) return key.startsWith("Arrow") ? go(this.layout.items[0]) : undefined;
    const peers = () => this.layout.items.filter((each) => each.node && each.depth === item.depth);
    const moves = {
      ArrowLeft: () => this.layout.itemOf.get(item.node.parent),
      ArrowRight: () => item.children.find((child) => child.node?.chosen) ?? item.children.find((child) => child.node?.alive) ?? item.children.find((child) => child.node),
      ArrowUp: () => peers()[peers().indexOf(item) - 1],
      ArrowDown: () => peers()[peers().indexOf(item) + 1],
    };
    return moves[key] && (go(moves[key]()) ?? (() => {}));
  }

  // --- drawing ---------------------------------------------------------------------------------
  draw(context, width, height) {
    if (!this.tree?.nodes.length) return;
    const view = this.view;
    const palette = { ramp: scoreColours() };
    for (const name of ["panel", "ink", "soft", "faint", "line", "accent", ...KV_PLACES]) palette[name] = colour(name);
    const onPath = new Set(this.selected === null ? [] : pathOf(this.tree, this.selected).map((node) => node.i));
    context.save();
    context.beginPath();
    context.rect(0, 26, width, height - 26);
    context.clip();
    this.drawGuides(context, height, palette);
    for (const pass of ["faded", "plain", "chosen"]) this.drawEdges(context, pass, palette);
    if (view.scale.y >= 12.5) for (const item of this.layout.items) this.drawLabel(context, item, width, height, palette);
    const drawnY = []; // by depth: of pruned steps on the same pixel, only one is drawn
    for (const item of this.layout.items) {
      const y = Math.round(view.y(item.row + 0.5));
      if (item.node?.alive !== false || drawnY[item.depth] !== y || item.node.i === this.selected) this.drawItem(context, item, onPath, height, palette);
      drawnY[item.depth] = y;
    }
    context.restore();
    this.drawDepths(context, width, palette);
  }
  drawGuides(context, height, palette) {
    context.strokeStyle = palette.line;
    context.lineWidth = 1;
    context.beginPath();
    for (let depth = 0; depth <= this.tree.depth; depth++) {
      const x = Math.round(this.view.x(depth)) + 0.5;
      context.moveTo(x, 26);
      context.lineTo(x, height);
    }
    context.stroke();
  }
  drawDepths(context, width, palette) {
    context.font = "11.5px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillStyle = palette.soft;
    const every = Math.ceil(26 / this.view.scale.x);
    for (let depth = 0; depth <= this.tree.depth; depth += every) {
      const x = this.view.x(depth);
      if (x < 0 || x > width) continue;
      const word = depth === 1 && this.view.scale.x > 60 ? "step 1" : depth === 0 ? (this.view.scale.x > 44 ? "prompt" : "") : String(depth);
      context.fillText(word, Math.max(x, 22), 17);
    }
  }
  isBelow(node) { return this.threshold !== null && node.score !== null && node.score < this.threshold; }
  drawEdges(context, pass, palette) {
    const view = this.view;
    const dense = view.scale.y < 3;
    context.lineWidth = { faded: dense ? 0.5 : 1, plain: dense ? 0.7 : 1.25, chosen: 2.5 }[pass];
    context.strokeStyle = { faded: palette.faint, plain: palette.soft, chosen: palette.accent }[pass];
    context.globalAlpha = { faded: 0.4, plain: 0.6, chosen: 1 }[pass];
    context.beginPath();
    for (const item of this.layout.items) {
      const [x, y] = [view.x(item.depth), view.y(item.row + 0.5)];
      let drawnY = NaN; // siblings on the same pixels share one stroke
      for (const child of item.children) {
        const kind = child.node?.chosen ? "chosen" : child.node?.alive && !this.isBelow(child.node) ? "plain" : "faded";
        if (kind !== pass) continue;
        const [toX, toY] = [view.x(child.depth), view.y(child.row + 0.5)];
        if (Math.max(y, toY) < 0 || Math.min(y, toY) > view.height || Math.round(toY) === drawnY) continue;
        drawnY = Math.round(toY);
        context.moveTo(x, y);
        const bend = (toX - x) * 0.5;
        context.bezierCurveTo(x + bend, y, toX - bend, toY, toX, toY);
      }
    }
    context.stroke();
    context.globalAlpha = 1;
  }
  drawItem(context, item, onPath, height, palette) {
    const [x, y] = [this.view.x(item.depth), this.view.y(item.row + 0.5)];
    if (y < -10 || y > height + 10) return;
    if (!item.node) return this.drawMark(context, item, x, y, palette);
    const { node } = item;
    const radius = clamp(this.view.scale.y * 0.42, node.alive ? 2.2 : 1.2, 5.5) * (node.alive ? 1 : 0.8);
    const hollow = node.parent !== null && (this.colouring === "score" ? node.score === null || node.state === "open" : !node.kv);
    context.globalAlpha = this.isBelow(node) ? 0.12 : node.alive ? 1 : 0.4;
    disc(context, x, y, radius, this.fill(node, palette));
    if (hollow) ring(context, x, y, radius, 1, palette.soft);
    // When zoomed out, the rings of neighbours would merge into a dark bar.
    const near = this.view.scale.y >= 7;
    if (node.state === "finished" && (near || node.chosen)) ring(context, x, y, radius + 2.5, 1.5, node.chosen ? palette.accent : palette.soft);
    if (node.ahead && near) ring(context, x, y, radius + 2.5, 1.5, palette.both, [2, 2]);
    context.globalAlpha = 1;
    if (node.i === this.marked) diamond(context, x, y, radius + 7, palette.accent);
    if (node.i === this.selected) ring(context, x, y, radius + 5, 2, palette.accent);
    else if (onPath.has(node.i)) ring(context, x, y, radius + 2.5, 1, palette.accent);
  }
  fill(node, palette) {
    if (this.colouring === "kv") return palette[node.kv] ?? palette.panel;
    return node.parent === null ? palette.ink : palette.ramp(this.tree.share(node.score)) ?? palette.panel;
  }
  drawMark(context, item, x, y, palette) {
    const rowHeight = this.view.scale.y;
    const share = Math.min(14, rowHeight * 0.86);
    context.fillStyle = palette.line;
    context.beginPath();
    context.roundRect(x - 6, y - share / 2, rowHeight >= 10 ? 34 : 16, Math.max(share, 1), share / 2);
    context.fill();
    if (rowHeight < 10) return;
    context.fillStyle = palette.soft;
    context.font = "10.5px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillText(`+${count(item.hidden)}`, x + 11, y + 3.5);
  }
  drawLabel(context, item, width, height, palette) {
    const y = this.view.y(item.row + 0.5);
    if (!item.node || item.node.parent === null || y < -10 || y > height + 10) return;
    const x = this.view.x(item.depth) + 11;
    const room = item.children.length ? this.view.scale.x - 26 : width - x - 8;
    if (room < 40 || x > width || x + room < 0) return;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "left";
    const text = fitted(context, oneLine(item.node.text) || (item.node.state === "open" ? "" : "(no text)"), room);
    if (!text) return;
    const below = this.isBelow(item.node);
    context.fillStyle = palette.panel; // hides the edges behind the text
    context.globalAlpha = 0.88;
    context.fillRect(x - 3, y - 6.5, context.measureText(text).width + 6, 13);
    context.globalAlpha = below ? 0.25 : item.node.alive ? 1 : 0.75;
    context.fillStyle = item.node.chosen ? palette.accent : item.node.alive ? palette.ink : palette.soft;
    context.fillText(text, x, y + 4);
    context.globalAlpha = 1;
  }
}

export function disc(context, x, y, radius, fill) {
  context.fillStyle = fill;
  if (radius < 1.3) return context.fillRect(x - radius, y - radius, 2 * radius, 2 * radius); // a square looks like a disc at this size
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

export function ring(context, x, y, radius, lineWidth, stroke, dashes = []) {
  context.strokeStyle = stroke;
  context.lineWidth = lineWidth;
  context.setLineDash(dashes);
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.stroke();
  context.setLineDash([]);
}

function diamond(context, x, y, radius, stroke) {
  context.strokeStyle = stroke;
  context.lineWidth = 2;
  context.beginPath();
  for (const [dx, dy] of [[0, -1], [1, 0], [0, 1], [-1, 0]]) context.lineTo(x + dx * radius, y + dy * radius);
  context.closePath();
  context.stroke();
}

// Returns the beginning of a text that fits into `room` pixels.
export function fitted(context, text, room) {
  const cut = shortened(text, Math.max(4, Math.floor(room / 4)));
  const measured = context.measureText(cut).width;
  return measured <= room ? cut : shortened(cut, Math.max(2, Math.floor((cut.length * room) / measured)));
}
