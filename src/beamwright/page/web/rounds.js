// Three small charts over the rounds: scores, states and lengths of the steps.

import { Drawing, colour, element, hideTip, scoreColours, showTip, shownScore } from "./common.js";
import { disc, ring } from "./tree.js";

export class RoundsPanel {
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.drawings = ["scores", "fates", "lengths"].map((name) => new Drawing(element(name), (...args) => this[name](...args)));
    const [scores] = this.drawings;
    scores.canvas.addEventListener("pointermove", (event) => {
      const node = this.scoreAt(event);
      if (node) showTip(event, `${node.lineage} \u00b7 round ${node.round}`, `${node.state}, score ${shownScore(node.score)}`);
      else hideTip();
    });
    scores.canvas.addEventListener("pointerleave", hideTip);
    scores.canvas.addEventListener("click", (event) => { const node = this.scoreAt(event); if (node) this.onSelect(node.i); });
  }
  show(tree) {
    this.tree = tree;
    this.rounds = Array.from({ length: tree.lastRound }, () => []);
    for (const node of tree.nodes) if (node.parent !== null && node.state !== "open") this.rounds[node.round - 1].push(node);
    for (const drawing of this.drawings) drawing.ask();
  }

  // --- places ----------------------------------------------------------------------------------
  column(width, round) { return 52 + ((round - 0.5) * (width - 60)) / Math.max(1, this.tree.lastRound); }
  columnWidth(width) { return (width - 60) / Math.max(1, this.tree.lastRound); }
  scoreY(height, score) { return height - 26 - this.tree.share(score) * (height - 40); }
  // Dots of a round get a fixed horizontal offset, so that dots with equal scores stay visible.
  scoreX(width, node) { return this.column(width, node.round) + (((node.i * 0.618) % 1) - 0.5) * Math.min(this.columnWidth(width) * 0.6, 26); }
  scoreAt(event) {
    const { width, height } = this.drawings[0];
    let [found, nearest] = [null, 8];
    for (const node of this.rounds.flat()) {
      if (node.score === null) continue;
      const distance = Math.hypot(this.scoreX(width, node) - event.offsetX, this.scoreY(height, node.score) - event.offsetY);
      if (distance < nearest) [found, nearest] = [node, distance];
    }
    return found;
  }
  axis(context, width, height, low, high) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("soft");
    context.textAlign = "right";
    context.fillText(high, 44, 18);
    if (low !== high) context.fillText(low, 44, height - 22);
    context.textAlign = "center";
    const every = Math.ceil(30 / this.columnWidth(width));
    for (let round = 1; round <= this.tree.lastRound; round += every) context.fillText(String(round), this.column(width, round), height - 5);
    context.fillStyle = colour("line");
    context.fillRect(52, height - 20.5, width - 60, 1);
  }
  nothing(context, text) {
    context.font = "13px system-ui, sans-serif";
    context.fillStyle = colour("soft");
    context.textAlign = "left";
    context.fillText(text, 0, 24);
  }

  // --- charts ----------------------------------------------------------------------------------
  scores(context, width, height) {
    if (!this.tree.scores) return this.nothing(context, "No step was scored.");
    const ramp = scoreColours();
    const { least, most } = this.tree.scores;
    this.axis(context, width, height, Number(least.toPrecision(2)), Number(most.toPrecision(2)));
    const scored = this.rounds.flat().filter((node) => node.score !== null);
    for (const node of scored.sort((a, b) => a.alive - b.alive || a.chosen - b.chosen)) {
      const [x, y] = [this.scoreX(width, node), this.scoreY(height, node.score)];
      context.globalAlpha = node.alive ? 1 : 0.3;
      disc(context, x, y, node.alive ? 3 : 2.2, ramp(this.tree.share(node.score)));
      if (node.chosen) ring(context, x, y, 4.5, 1.5, colour("accent"));
    }
    context.globalAlpha = 1;
  }
  fates(context, width, height) {
    if (!this.rounds.length) return this.nothing(context, "Nothing was decoded.");
    const most = Math.max(1, ...this.rounds.map((nodes) => nodes.length));
    this.axis(context, width, height, 0, most);
    const barWidth = Math.max(1, Math.min(18, this.columnWidth(width) * 0.6));
    const kinds = [["finished", "score-2"], ["candidate", "score-1"], ["kept", "score-1"], ["pruned", "faint"]];
    this.rounds.forEach((nodes, i) => {
      let y = height - 21; // 16 pixels at the top stay free for the legend
      for (const [state, name] of kinds) {
        const part = (nodes.filter((node) => node.state === state).length / most) * (height - 37);
        context.fillStyle = colour(name);
        context.fillRect(this.column(width, i + 1) - barWidth / 2, y - part, barWidth, Math.max(0, part - 0.5));
        y -= part;
      }
    });
    context.textAlign = "left";
    let x = 58;
    for (const [word, name] of [["finished", "score-2"], ["kept", "score-1"], ["pruned", "faint"]]) {
      context.fillStyle = colour(name);
      context.fillRect(x, 1, 8, 8);
      context.fillStyle = colour("soft");
      context.fillText(word, x + 12, 9);
      x += 24 + context.measureText(word).width;
    }
  }
  lengths(context, width, height) {
    if (!this.rounds.length) return this.nothing(context, "Nothing was decoded.");
    const sorted = this.rounds.map((nodes) => nodes.map((node) => node.tokens).sort((a, b) => a - b));
    const most = Math.max(1, ...sorted.map((tokens) => tokens.at(-1) ?? 0));
    this.axis(context, width, height, 0, most);
    const y = (tokens) => height - 21 - (tokens / most) * (height - 34);
    sorted.forEach((tokens, i) => {
      if (!tokens.length) return;
      const x = this.column(width, i + 1);
      const [first, middle, last] = [tokens[0], tokens[tokens.length >> 1], tokens.at(-1)];
      context.fillStyle = colour("faint");
      context.fillRect(x - 1, y(last), 2, y(first) - y(last));
      for (const each of [first, last]) disc(context, x, y(each), 2, colour("soft"));
      disc(context, x, y(middle), 3.5, colour("score-1"));
    });
  }
}
