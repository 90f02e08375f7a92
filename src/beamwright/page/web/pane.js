// One tree of the page: a run that is followed while it grows, and the part of it that is shown.

import { follow } from "./api.js";
import { Run, blankTree } from "./run.js";
import { prepare } from "./layout.js";
import { TreePanel } from "./tree.js";

const READABLE = 60; // from this number of steps on, pruned siblings become one mark, which leaves room for texts

export class Pane {
  // onChange: called after new events. onSelect(i): called when a step of this tree is selected.
  constructor(canvas, onChange, onSelect) {
    this.panel = new TreePanel(canvas, onSelect);
    this.onChange = onChange;
    this.clear();
  }
  clear() {
    this.following?.abort();
    this.run = null;
    this.tree = blankTree();
    prepare(this.tree);
    this.panel.show(this.tree);
  }
  async open(id) {
    this.clear();
    const following = (this.following = new AbortController());
    const run = (this.run = new Run(id));
    await follow(id, (events) => { run.add(events); this.onChange(); }, following.signal);
  }
  // mode: the user's choice for pruned steps; null: depends on the number of nodes.
  show(round, mode) {
    const tree = this.run === null ? this.tree : this.run.tree(round);
    const opened = this.tree.opened; // kept when another round is shown
    this.tree = tree;
    if (tree.about !== null) tree.opened = opened;
    this.panel.update(tree, mode ?? (tree.nodes.length > READABLE ? "group" : "show"));
    if (this.panel.selected !== null && this.panel.selected >= tree.nodes.length) this.panel.select(null);
  }
  // Selects the step with this lineage, or none.
  selectLineage(lineage) {
    const node = this.tree.byLineage.get(lineage);
    this.panel.select(node?.i ?? null);
  }
}

// The first difference between two searches, in the order of round and lineage.

const TELLING = 1e-4; // smaller differences of scores may come from rounding alone

function difference(a, b) {
  if (!a || !b) return "exists in only one of them";
  if (a.text !== b.text || a.tokens !== b.tokens) return "different texts";
  if ((a.score === null) !== (b.score === null) || Math.abs(a.score - b.score) > TELLING) return `scores ${a.score} and ${b.score}`;
  return a.state === b.state ? null : `${a.state} and ${b.state}`;
}

function before(one, other) {
  const [a, b] = [one, other].map((lineage) => lineage.split(".").map(Number));
  for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return a[i] < b[i];
  return a.length < b.length;
}

// Returns {lineage, round, why}, or null if the searches are equal in all rounds that both have.
export function firstDivergence(a, b) {
  const rounds = Math.min(a.rounds, b.rounds);
  let first = null;
  for (const lineage of new Set([...a.byLineage.keys(), ...b.byLineage.keys()])) {
    const [left, right] = [a.byLineage.get(lineage), b.byLineage.get(lineage)];
    const { round } = left ?? right;
    if (round > rounds || (first !== null && (round > first.round || (round === first.round && before(first.lineage, lineage))))) continue;
    const why = difference(left, right);
    if (why !== null) first = { lineage, round, why };
  }
  return first;
}
