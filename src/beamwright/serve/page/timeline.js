// Tracks of what ran, and below them, on the same axis of seconds, where each segment's KV was.

import { Viewport, clamp, colour, connectZoomButtons, element, hideTip, make, plural, showTip, shownBytes, shownSeconds } from "./common.js";
import { fitted } from "./tree.js";

const TRACKS = [["compute", "compute"], ["verify", "verify"], ["h2d", "host to device"], ["d2h", "device to host"], ["stall", "stall"], ["schedule", "schedule"]];
const PLACES = [["device", "on the device"], ["both", "on both"], ["host", "on the host"], ["none", "nowhere: released"]];
const TRACK_HEIGHT = 15;
const TRACK_PITCH = 19;
const GUTTER = 132;

export class TimePanel {
  constructor(timeline, onSelect) {
    this.timeline = timeline;
    this.onSelect = onSelect;
    this.tracks = TRACKS.map(([track, word]) => ({ track, word, spans: timeline.spans.filter((span) => span[0] === track) })).filter(({ spans }) => spans.length);
    this.tracksEnd = 10 + this.tracks.length * TRACK_PITCH; // then the axis, then the segments
    this.top = this.tracksEnd + 26;
    this.moved = Object.keys(timeline.residences).length > 0;
    this.rows = [];
    element("time-empty").hidden = this.moved;
    element("time-empty").textContent = this.tracks.length ? "Where the KV was has not been recorded." : "Neither times nor where the KV was have been recorded.";
    for (const id of ["time-box", "time-tools"]) element(id).hidden = !this.moved && !this.tracks.length;
    this.view = new Viewport(element("time"), (...args) => this.draw(...args), {
      margin: { left: GUTTER, right: 12, top: this.top, bottom: 8 },
      xPower: 1,
      limits: (width, height) => {
        const fitX = (width - GUTTER - 12) / this.view.world.width;
        const fitY = Math.min(14, (height - this.top - 8) / this.view.world.height);
        return { x: [fitX, fitX * 5000], y: [fitY, 16] };
      },
    });
    this.view.onHover = (event) => this.hover(event);
    this.view.onClick = (event) => { const row = this.rowAt(event.offsetY); if (row?.node) this.onSelect(row.node.i); };
    this.view.onKey = (key) => ({ ArrowLeft: () => this.view.moveBy(-60, 0), ArrowRight: () => this.view.moveBy(60, 0), ArrowUp: () => this.view.moveBy(0, -60), ArrowDown: () => this.view.moveBy(0, 60) })[key];
    connectZoomButtons("time", this.view);
    this.legend();
  }
  legend() {
    const entries = [...this.tracks.map(({ track, word }) => [track, word]), ...(this.moved ? PLACES : [])];
    element("time-legend").replaceChildren(...entries.map(([name, word]) => make("span", {}, make("i", { style: `--c: var(--${name})` }), word)));
  }
  // Segments of this tree in the order of its nodes, then those that belong to none of them.
  show(tree) {
    if (tree === this.tree && tree.nodes.length === this.numNodes) return; // who has zoomed keeps the place
    Object.assign(this, { tree, numNodes: tree.nodes.length });
    const { residences, root } = this.timeline;
    const nodes = new Map(tree.nodes.map((node) => [[root, node.lineage].filter(Boolean).join("."), node]));
    const known = [...nodes.keys()].filter((segment) => residences[segment]);
    const others = Object.keys(residences).filter((segment) => !nodes.has(segment));
    this.rows = [...known, ...others].map((segment) => ({ segment, node: nodes.get(segment) ?? null, stays: residences[segment] }));
    this.view.world = { width: Math.max(this.timeline.end, 1e-9), height: Math.max(1, this.rows.length) };
    this.selected = null;
    element("time").style.height = `${clamp(this.top + this.rows.length * 13 + 10, this.top + 8, 640)}px`;
    this.view.fit();
  }
  select(i) {
    this.selected = i;
    const row = this.rows.findIndex(({ node }) => node?.i === i);
    if (row >= 0) this.view.reveal(this.view.width / 2, this.view.y(row + 0.5));
    this.view.ask();
  }

  // --- what is under the pointer ---------------------------------------------------------------
  rowAt(y) { return y < this.top ? undefined : this.rows[Math.floor(this.view.worldY(y))]; }
  hover(event) {
    const time = this.view.worldX(event.offsetX);
    const track = this.tracks[Math.floor((event.offsetY - 8) / TRACK_PITCH)];
    const reach = 2 / this.view.scale.x;
    if (track && event.offsetY < this.tracksEnd) {
      const span = track.spans.findLast(([, , start, end]) => start - reach <= time && time <= end + reach);
      return span ? showTip(event, span[1], spanFacts(span, track.word)) : hideTip();
    }
    const row = this.rowAt(event.offsetY);
    if (!row) return hideTip();
    const stay = row.stays.find(([start, end]) => start <= time && time < end);
    const place = stay ? `${PLACES.find(([name]) => name === stay[2])[1]}\n${shownSeconds(stay[0])} to ${shownSeconds(stay[1])}` : "does not exist here";
    const node = row.node ? `\n${row.node.parent === null ? "prompt" : `round ${row.node.round}, ${row.node.state}`}, ${plural(row.node.tokens, "token")}` : "";
    showTip(event, row.segment, place + node);
  }

  // --- drawing ---------------------------------------------------------------------------------
  draw(context, width, height) {
    context.font = "11.5px system-ui, sans-serif";
    this.drawAxis(context, width, height);
    this.drawTracks(context, width);
    if (this.rows.length) this.drawRows(context, width, height);
  }
  drawAxis(context, width, height) {
    const step = niceStep(90 / this.view.scale.x);
    context.textAlign = "center";
    for (let i = Math.ceil(this.view.worldX(GUTTER) / step - 1e-9); ; i++) {
      const x = this.view.x(i * step);
      if (x > width - 8) break;
      context.fillStyle = colour("line");
      context.fillRect(Math.round(x), 6, 1, height - 6);
      context.fillStyle = colour("panel");
      context.fillRect(x - 24, this.tracksEnd + 2, 48, 18);
      context.fillStyle = colour("soft");
      context.fillText(shownSeconds(Number((i * step).toPrecision(6))), x, this.tracksEnd + 15);
    }
  }
  drawTracks(context, width) {
    this.tracks.forEach(({ track, word, spans }, i) => {
      const y = 8 + i * TRACK_PITCH;
      context.fillStyle = colour("soft");
      context.textAlign = "right";
      context.fillText(word, GUTTER - 12, y + 11.5);
      context.fillStyle = colour(track);
      const most = Math.max(1, ...spans.map(([, , , , args]) => (args.open_rows ?? 0) + (args.rows_ahead ?? 0)));
      for (const [, , start, end, args] of spans) {
        const [from, to] = [Math.max(this.view.x(start), GUTTER), Math.min(this.view.x(end), width)];
        if (to < GUTTER || from > width) continue;
        // A hair between neighbours, so that groups can be told apart; as high as the batch is full,
        // what is decoded ahead of selection paler and on top.
        const bar = (low, high) => context.fillRect(from, y + TRACK_HEIGHT * (1 - high), Math.max(0.8, to - from - 0.6), TRACK_HEIGHT * (high - low));
        if (args.open_rows === undefined) { bar(0, 1); continue; }
        const open = args.open_rows / most;
        bar(0, open);
        context.globalAlpha = 0.4;
        bar(open, open + args.rows_ahead / most);
        context.globalAlpha = 1;
      }
    });
  }
  drawRows(context, width, height) {
    const palette = Object.fromEntries([...PLACES.map(([name]) => name), "accent", "soft", "faint", "ink"].map((name) => [name, colour(name)]));
    const rowHeight = this.view.scale.y;
    context.save();
    context.beginPath();
    context.rect(0, this.top - 2, width, height);
    context.clip();
    const first = Math.max(0, Math.floor(this.view.worldY(this.top)));
    const last = Math.min(this.rows.length, Math.ceil(this.view.worldY(height)));
    const thickness = rowHeight > 4 ? rowHeight - 1.5 : Math.max(rowHeight, 0.6);
    for (let i = first; i < last; i++) {
      const y = this.view.y(i);
      for (const [start, end, place] of this.rows[i].stays) {
        const [from, to] = [Math.max(this.view.x(start), GUTTER), Math.min(this.view.x(end), width)];
        if (to < GUTTER || from > width) continue;
        const thin = place === "none" && rowHeight > 4;
        context.fillStyle = palette[place];
        context.globalAlpha = place === "none" && !thin ? 0.35 : 1;
        context.fillRect(from, thin ? y + thickness / 2 : y, Math.max(0.6, to - from), thin ? 1 : thickness);
      }
      context.globalAlpha = 1;
      this.drawName(context, this.rows[i], y, rowHeight, thickness, palette);
      if (this.rows[i].node?.i === this.selected && this.selected !== null) {
        context.strokeStyle = palette.accent;
        context.lineWidth = 1.5;
        context.strokeRect(GUTTER - 4, y - 1, width - GUTTER, thickness + 2);
      }
    }
    context.restore();
  }
  // The tree's outline beside its rows; with room for it, the lineage.
  drawName(context, { segment, node }, y, rowHeight, thickness, palette) {
    context.fillStyle = node?.chosen ? palette.accent : node?.alive ? palette.soft : palette.faint;
    if (rowHeight >= 11) {
      context.textAlign = "right";
      context.fillText(fitted(context, segment, GUTTER - 16), GUTTER - 12, y + thickness / 2 + 4);
    } else if (node) {
      context.fillRect(12 + Math.min(node.depth * 4, GUTTER - 32), y, 8, Math.max(thickness, 0.8));
    }
  }
}

function spanFacts([, , start, end, args], word) {
  const facts = Object.entries(args).map(([name, value]) => `${name.replace(/_/g, " ")}: ${typeof value === "number" && /bytes/.test(name) ? shownBytes(value) : value}`);
  return [`${word}, ${shownSeconds(end - start)} from ${shownSeconds(start)}`, ...facts].join("\n");
}

// The least of 1, 2, 5 times a power of ten that is not below `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * (1 - 1e-9));
}
