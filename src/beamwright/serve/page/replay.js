// The round that is shown: the newest, or one that was chosen, or one after the other.

import { element } from "./common.js";

const EVERY_MS = 700;

export class Replay {
  // round: that is shown, null for the newest.
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
    }, EVERY_MS);
    this.onChange();
  }
  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.onChange();
  }
}
