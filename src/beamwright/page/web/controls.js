// Controls around the trees: gauges of the server, the choice of the round, and the votes.

import { count, element, make, plural, shortened, shownBytes, shownScore } from "./common.js";
import { fetched } from "./api.js";

// Current figures of the server, as far as it reports them: memory, link, tokens per second.

const POLL_MS = 2000;

const figure = (value, unit) => (unit === "bytes" ? shownBytes(value) : `${count(Math.round(value * 10) / 10)}${unit ? ` ${unit}` : ""}`);

export class Gauges {
  constructor(list) {
    this.list = list;
    this.totals = new Map();
  }
  start() {
    setInterval(() => { if (!document.hidden) this.poll(); }, POLL_MS);
    this.poll();
  }
  async poll() {
    if (this.polling) return;
    this.polling = true;
    try {
      const { gauges } = await fetched("/feed/gauges");
      this.list.replaceChildren(...gauges.map((gauge) => this.entry(gauge)));
    } catch { /* the server cannot be reached; keep the last figures */ }
    this.polling = false;
  }
  entry(gauge) {
    const words = gauge.total === undefined ? this.level(gauge) : this.rate(gauge);
    const entry = make("div", {}, make("dt", {}, gauge.name), make("dd", {}, words));
    if (gauge.of) {
      const bar = make("i");
      bar.style.width = `${Math.min(100, (100 * gauge.value) / gauge.of)}%`;
      entry.append(make("span", { class: "track" }, bar));
    }
    return entry;
  }
  level({ value, of, unit }) { return of ? `${figure(value, unit)} of ${figure(of, unit)}` : figure(value, unit); }
  // A counter is shown as a rate over the last few polls, because all tokens of a round arrive at once.
  rate({ name, total, unit }) {
    const looks = [...(this.totals.get(name) ?? []), { at: performance.now(), total }].slice(-6);
    this.totals.set(name, looks);
    const [first, last] = [looks[0], looks.at(-1)];
    const rate = last.at > first.at ? (1000 * (last.total - first.total)) / (last.at - first.at) : 0;
    return `${figure(rate, unit)}/s`;
  }
}

// The choice of the shown round: the newest, a chosen one, or all of them in turn.

const PLAY_MS = 700;

export class Replay {
  // round: the shown round; null for the newest.
  constructor(onChange) {
    Object.assign(this, { onChange, round: null, rounds: 0, timer: null });
    element("round").addEventListener("input", () => { this.stop(); this.choose(Number(element("round").value)); });
    element("play").addEventListener("click", () => (this.timer === null ? this.play() : this.stop()));
  }
  set(rounds) {
    this.rounds = rounds;
    const slider = element("round");
    slider.max = rounds;
    slider.value = this.round ?? rounds;
    slider.disabled = rounds === 0;
    element("round-shown").textContent = this.round === null ? `${rounds}` : `${this.round} of ${rounds}`;
    element("play").textContent = this.timer === null ? "Play" : "Pause";
  }
  choose(round) {
    this.round = round >= this.rounds ? null : round;
    this.onChange();
  }
  follow() {
    this.stop();
    this.round = null;
  }
  play() {
    this.choose(this.round === null ? 0 : this.round);
    this.timer = setInterval(() => {
      this.choose((this.round ?? this.rounds) + 1);
      if (this.round === null) this.stop();
    }, PLAY_MS);
    this.onChange();
  }
  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.onChange();
  }
}

// A histogram of the votes: the answers of the final candidates, and how often each was given.

const MOST_BALLOTS = 12;

export function ballots(tree) {
  const found = new Map();
  for (const node of tree.nodes) {
    if (node.state !== "finished") continue;
    const key = node.vote ?? "";
    const ballot = found.get(key) ?? { said: node.vote === null ? null : node.answer, nodes: [], best: null, sum: 0, chosen: false };
    ballot.nodes.push(node);
    ballot.sum += node.score ?? 0;
    if (ballot.best === null || (node.score ?? -Infinity) > (ballot.best.score ?? -Infinity)) ballot.best = node;
    if (node.i === tree.chosen) [ballot.best, ballot.chosen] = [node, true];
    found.set(key, ballot);
  }
  return [...found.values()].sort((a, b) => b.nodes.length - a.nodes.length || b.sum - a.sum);
}

export function showVotes(list, note, tree, onSelect) {
  const found = ballots(tree);
  const most = Math.max(1, ...found.map((ballot) => ballot.nodes.length));
  list.replaceChildren(...found.slice(0, MOST_BALLOTS).map((ballot) => {
    const bar = make("i");
    bar.style.width = `${(100 * ballot.nodes.length) / most}%`;
    const amount = `${plural(ballot.nodes.length, "candidate")}, sum of scores ${shownScore(ballot.sum)}`;
    const said = make("span", { class: "said" }, ballot.said === null ? "(no answer stated)" : shortened(ballot.said, 200));
    const button = make("button", { type: "button", class: ballot.chosen ? "chosen" : "" }, said, make("span", { class: "track" }, bar), make("span", { class: "amount" }, amount));
    button.addEventListener("click", () => onSelect(ballot.best.i));
    return make("li", {}, button);
  }));
  const rest = found.length - MOST_BALLOTS;
  note.textContent = !found.length ? "No candidate is final yet." : rest > 0 ? `and ${count(rest)} other answers` : "";
}
