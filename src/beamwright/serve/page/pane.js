// One tree of the page: a run, followed as it grows, and what is shown of it.

import { follow } from "./api.js";
import { Run, blankTree } from "./run.js";
import { prepare } from "./layout.js";
import { TreePanel } from "./tree.js";

const READABLE = 60; // steps from which pruned siblings become one mark, so that texts have room

export class Pane {
  // onChange: there are new events; onSelect(i): a step was chosen in this tree.
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
  // mode: as chosen; null lets the number of nodes decide.
  show(round, mode) {
    const tree = this.run === null ? this.tree : this.run.tree(round);
    const opened = this.tree.opened; // stays, whichever round is shown
    this.tree = tree;
    if (tree.about !== null) tree.opened = opened;
    this.panel.update(tree, mode ?? (tree.nodes.length > READABLE ? "group" : "show"));
    if (this.panel.selected !== null && this.panel.selected >= tree.nodes.length) this.panel.select(null);
  }
  // The same step of another search, if it has it.
  selectLineage(lineage) {
    const node = this.tree.byLineage.get(lineage);
    this.panel.select(node?.i ?? null);
  }
}
