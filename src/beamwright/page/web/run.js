// A search built from its events, and its tree after any round.

import { prepare } from "./layout.js";

const BLANK = { round: 0, text: "", tokens: 0, score: null, step_score: null, state: "open", stop: null, notes: {}, answer: null, vote: null, ahead: 0, thought: false, sources: [], kv: null };

export function blankTree() {
  return { problem: "", about: null, answer: null, chosen: null, rounds: 0, reason_fewer: null, error: null, tokens: 0, warnings: [], elapsed_s: null, over: null, stats: null, nodes: [], byLineage: new Map() };
}

function change(tree, step) {
  let node = tree.byLineage.get(step.lineage);
  if (node === undefined) {
    const parent = step.lineage === "" ? null : tree.byLineage.get(step.lineage.slice(0, Math.max(0, step.lineage.lastIndexOf("."))));
    if (parent === undefined || (parent === null && tree.nodes.length)) return;
    node = { ...BLANK, lineage: step.lineage, i: tree.nodes.length, parent: parent === null ? null : parent.i };
    tree.nodes.push(node);
    tree.byLineage.set(node.lineage, node);
  }
  for (const name of Object.keys(BLANK)) if (step[name] !== undefined) node[name] = step[name];
  node.text ??= "";
}

function tell(tree, event) {
  if (event.event === "begin") Object.assign(tree, { problem: event.problem, about: event });
  for (const step of event.nodes ?? []) change(tree, step);
  if (event.event === "round") Object.assign(tree, { rounds: event.round, tokens: event.tokens, elapsed_s: event.elapsed_s });
  if (event.event === "end") {
    const { answer, reason_fewer, error, warnings = [], elapsed_s, stats, state } = event;
    Object.assign(tree, { answer, reason_fewer, error, warnings, stats, over: state, elapsed_s: elapsed_s ?? tree.elapsed_s });
    tree.chosen = tree.byLineage.get(event.chosen)?.i ?? null;
    if (state !== "saved") for (const node of tree.nodes) node.kv = null;
  }
}

function ready(tree) {
  for (const node of tree.nodes) {
    const parent = node.parent === null ? null : tree.nodes[node.parent];
    node.start = parent === null ? 0 : parent.start + parent.tokens;
  }
  prepare(tree);
  return tree;
}

export class Run {
  constructor(id) {
    Object.assign(this, { id, events: [], rounds: 0, latest: blankTree(), past: null });
  }
  get over() { return this.latest.over !== null; }
  add(events) {
    for (const event of events) {
      this.events.push(event);
      tell(this.latest, event);
      if (event.event === "round") this.rounds = event.round;
    }
  }
  // Returns the tree after `round`; null for the newest. The last object is reused and extended if possible.
  tree(round = null) {
    if (round === null || round >= this.rounds) return ready(this.latest);
    if (this.past === null || this.past.rounds > round) this.past = { ...blankTree(), next: 0 };
    const { past } = this;
    for (; past.next < this.events.length; past.next++) {
      const event = this.events[past.next];
      if (event.event === "end" || event.round > round) break;
      tell(past, event);
    }
    return ready(past);
  }
  toJson() {
    return { format: "beamwright run", version: 1, events: this.events };
  }
}
