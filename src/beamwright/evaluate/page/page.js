// The saved page: what was asked and answered, the panels, and one selected step for all of them.

import { clamp, connectZoomButtons, count, element, make, oneLine, shortened, shownScore } from "./common.js";
import { showDetails, showTreeLegend } from "./details.js";
import { prepare } from "./layout.js";
import { RoundsPanel } from "./rounds.js";
import { TimePanel } from "./timeline.js";
import { TreePanel } from "./tree.js";

function showOpening(tree) {
  element("problem").textContent = tree.problem || "(a synthetic prompt)";
  const answer = element("answer");
  answer.textContent = tree.answer ?? (tree.chosen === null ? "No candidate was chosen." : "The chosen candidate states no answer.");
  answer.classList.toggle("missing", tree.answer === null);
  const chosen = tree.chosen === null ? null : tree.nodes[tree.chosen];
  const notes = [chosen && `candidate ${chosen.lineage}, score ${shownScore(chosen.score)}`, tree.reason_fewer];
  element("answer-note").textContent = notes.filter(Boolean).join("; ");
  const steps = tree.nodes.filter((node) => node.parent !== null && node.state !== "open");
  const inState = (state) => steps.filter((node) => node.state === state).length;
  const figures = [
    ["rounds", tree.rounds],
    ["steps", steps.length],
    ["pruned", inState("pruned")],
    ["final candidates", inState("finished") + inState("candidate")],
    ["tokens in steps", steps.reduce((sum, node) => sum + node.tokens, 0)],
    ["tokens in the prompt", tree.nodes[0].tokens],
  ];
  element("figures").replaceChildren(...figures.map(([word, value]) => make("div", {}, make("dt", {}, word), make("dd", {}, count(value)))));
}

// The tree's panel with its buttons, as high as its rows need.
class SavedTreePanel extends TreePanel {
  constructor(onSelect) {
    super(element("tree"), onSelect);
    connectZoomButtons("tree", this.view);
    for (const radio of document.querySelectorAll('[name="pruned"]')) {
      radio.addEventListener("change", () => { this.tree.opened.clear(); this.setMode(radio.value); });
    }
  }
  setMode(mode) {
    document.querySelector(`[name="pruned"][value="${mode}"]`).checked = true;
    super.setMode(mode);
    const most = clamp(innerHeight * 0.64, 380, 780);
    this.view.canvas.style.height = `${clamp(this.layout.rows * 24 + 58, 280, most)}px`;
    this.view.fit();
  }
}

function start() {
  const { trees, timeline } = JSON.parse(element("data").textContent);
  trees.forEach(prepare);
  const known = new Set(trees.flatMap((tree) => tree.nodes.map((node) => node.lineage)));
  const others = Object.keys(timeline.residences).filter((segment) => !known.has(segment));
  let tree = null;
  const select = (i) => {
    treePanel.select(i);
    timePanel.select(i);
    showDetails(element("details"), tree, i, select);
  };
  const treePanel = new SavedTreePanel(select);
  const roundsPanel = new RoundsPanel(select);
  const timePanel = new TimePanel(timeline, select);
  const show = (shown) => {
    tree = shown;
    showOpening(tree);
    showTreeLegend(element("tree-legend"), tree);
    treePanel.show(tree);
    roundsPanel.show(tree);
    timePanel.show(tree, others);
    select(tree.chosen);
  };
  const choice = element("tree-select");
  choice.append(...trees.map((each, i) => make("option", { value: i }, shortened(`${each.nodes[0].lineage}: ${oneLine(each.problem)}`, 60))));
  choice.addEventListener("change", () => show(trees[Number(choice.value)]));
  element("tree-choice").hidden = trees.length < 2;
  show(trees[0]);
}

start();
