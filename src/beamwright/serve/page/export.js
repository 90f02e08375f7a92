// What can be taken away: the run as JSON, which `beamwright view` opens, and the tree as SVG.

import { clamp, colour, make } from "./common.js";
import { SvgContext } from "./svg.js";

const UNPRINTABLE = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd]/g; // of XML; surrogate pairs go as well

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

// The whole tree, whatever part of it is in sight, with labels while there are few rows.
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
