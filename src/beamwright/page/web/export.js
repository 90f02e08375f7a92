// Downloads: the run as JSON, which `beamwright view` opens, and the tree as SVG.

import { clamp, colour, make } from "./common.js";

const UNPRINTABLE = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd]/g; // characters that XML forbids; surrogate pairs are removed, too

function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export function exportJson(run) {
  save(`${run.id}.json`, JSON.stringify(run.toJson()), "application/json");
}

export function exportSvg(run, panel) {
  save(`${run.id}.svg`, treeSvg(panel).replace(UNPRINTABLE, "\ufffd"), "image/svg+xml");
}

// Returns the whole tree as SVG, including parts that are not visible. A tree with few rows gets labels.
export function treeSvg(panel) {
  const { tree, layout } = panel;
  const scale = { x: clamp(2400 / Math.max(1, tree.depth), 40, 220), y: clamp(6000 / Math.max(1, layout.rows), 2, 22) };
  const [width, height] = [tree.depth * scale.x + 240, layout.rows * scale.y + 60];
  const context = new SvgContext(width, height);
  context.fillStyle = colour("panel");
  context.fillRect(0, 0, width, height);
  const whole = Object.create(panel);
  whole.view = { scale, width, height, x: (x) => 26 + x * scale.x, y: (y) => 40 + y * scale.y };
  whole.draw(context, width, height);
  return context.toString();
}

// A canvas context that writes SVG instead of drawing.
const SVG = "http://www.w3.org/2000/svg";
const rounded = (number) => Math.round(number * 100) / 100;

class SvgContext {
  constructor(width, height) {
    this.root = document.createElementNS(SVG, "svg");
    this.put(this.root, { xmlns: SVG, viewBox: `0 0 ${rounded(width)} ${rounded(height)}`, width: rounded(width), height: rounded(height) });
    this.measures = document.createElement("canvas").getContext("2d");
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, font: "12px sans-serif", textAlign: "left", dashes: [], path: "" });
  }
  put(made, attributes) {
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }
  add(tag, attributes) {
    const made = this.put(document.createElementNS(SVG, tag), attributes);
    if (this.globalAlpha < 1) made.setAttribute("opacity", this.globalAlpha);
    this.root.append(made);
    return made;
  }
  go(letter, ...numbers) { this.path += letter + numbers.map(rounded).join(" "); }
  save() {}
  restore() {}
  clip() { this.path = ""; } // nothing is clipped: the file shows the whole tree
  beginPath() { this.path = ""; }
  closePath() { this.path += "Z"; }
  moveTo(x, y) { this.go("M", x, y); }
  lineTo(x, y) { this.go(this.path ? "L" : "M", x, y); }
  bezierCurveTo(...points) { this.go("C", ...points); }
  rect(x, y, width, height) { this.go("M", x, y); this.go("h", width); this.go("v", height); this.go("h", -width); this.path += "Z"; }
  roundRect(x, y, width, height) { this.rect(x, y, width, height); }
  arc(x, y, radius) { // the panels draw full circles only
    this.go("M", x - radius, y);
    for (const side of [2, -2]) this.go("a", radius, radius, 0, 1, 0, side * radius, 0);
  }
  setLineDash(dashes) { this.dashes = dashes; }
  fill() { this.add("path", { d: this.path, fill: this.fillStyle }); }
  stroke() {
    if (!this.path) return;
    const made = this.add("path", { d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
    if (this.dashes.length) made.setAttribute("stroke-dasharray", this.dashes.join(" "));
  }
  fillRect(x, y, width, height) { this.add("rect", { x: rounded(x), y: rounded(y), width: rounded(width), height: rounded(height), fill: this.fillStyle }); }
  measureText(text) {
    this.measures.font = this.font;
    return this.measures.measureText(text);
  }
  fillText(text, x, y) {
    const size = parseFloat(this.font);
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    this.add("text", { x: rounded(x), y: rounded(y), fill: this.fillStyle, "font-size": size, "font-family": "system-ui, sans-serif", "text-anchor": anchor }).textContent = text;
  }
  toString() { return new XMLSerializer().serializeToString(this.root); }
}
