// Figures of the server as it is now: memory, link, tokens per second, where they are known.

import { count, make, shownBytes } from "./common.js";
import { fetched } from "./api.js";

const EVERY_MS = 2000;

const shown = (value, unit) => (unit === "bytes" ? shownBytes(value) : `${count(Math.round(value * 10) / 10)}${unit ? ` ${unit}` : ""}`);

export class Gauges {
  constructor(list) {
    this.list = list;
    this.totals = new Map();
  }
  start() {
    setInterval(() => { if (!document.hidden) this.poll(); }, EVERY_MS);
    this.poll();
  }
  async poll() {
    if (this.polling) return;
    this.polling = true;
    try {
      const { gauges } = await fetched("/feed/gauges");
      this.list.replaceChildren(...gauges.map((gauge) => this.entry(gauge)));
    } catch { /* the server is away; what was shown stays */ }
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
  level({ value, of, unit }) { return of ? `${shown(value, unit)} of ${shown(of, unit)}` : shown(value, unit); }
  // What only grows is shown per second, over a few looks: a round's tokens come all at once.
  rate({ name, total, unit }) {
    const looks = [...(this.totals.get(name) ?? []), { at: performance.now(), total }].slice(-6);
    this.totals.set(name, looks);
    const [first, last] = [looks[0], looks.at(-1)];
    const rate = last.at > first.at ? (1000 * (last.total - first.total)) / (last.at - first.at) : 0;
    return `${shown(rate, unit)}/s`;
  }
}
