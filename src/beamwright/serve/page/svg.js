// A canvas context that writes SVG: what a panel draws, as a file.

const SVG = "http://www.w3.org/2000/svg";
const round = (number) => Math.round(number * 100) / 100;

export class SvgContext {
  constructor(width, height) {
    this.root = document.createElementNS(SVG, "svg");
    this.put(this.root, { xmlns: SVG, viewBox: `0 0 ${round(width)} ${round(height)}`, width: round(width), height: round(height) });
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
  go(letter, ...numbers) { this.path += letter + numbers.map(round).join(" "); }
  save() {}
  restore() {}
  clip() { this.path = ""; } // all that is drawn is in sight
  beginPath() { this.path = ""; }
  closePath() { this.path += "Z"; }
  moveTo(x, y) { this.go("M", x, y); }
  lineTo(x, y) { this.go(this.path ? "L" : "M", x, y); }
  bezierCurveTo(...points) { this.go("C", ...points); }
  rect(x, y, width, height) { this.go("M", x, y); this.go("h", width); this.go("v", height); this.go("h", -width); this.path += "Z"; }
  roundRect(x, y, width, height) { this.rect(x, y, width, height); }
  arc(x, y, radius) { // only ever whole circles
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
  fillRect(x, y, width, height) { this.add("rect", { x: round(x), y: round(y), width: round(width), height: round(height), fill: this.fillStyle }); }
  measureText(text) {
    this.measures.font = this.font;
    return this.measures.measureText(text);
  }
  fillText(text, x, y) {
    const size = parseFloat(this.font);
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    this.add("text", { x: round(x), y: round(y), fill: this.fillStyle, "font-size": size, "font-family": "system-ui, sans-serif", "text-anchor": anchor }).textContent = text;
  }
  toString() { return new XMLSerializer().serializeToString(this.root); }
}
