// Texts: the legend of the tree's colours, and the path to a selected step.

import { count, make, plural, scoreColours, shownScore } from "./common.js";
import { named, pathOf } from "./layout.js";

// seen: further entries of the legend, each as [kind, colour, words].
export function showTreeLegend(legend, tree, seen = []) {
  const entry = ([kind, name, words]) => make("span", {}, make("i", { class: kind, style: `--c: var(--${name})` }), words);
  const { scores } = tree;
  const always = [["path", "accent", "chosen path"], ["ring", "soft", "finished"], ["dot faded", "score-1", "pruned, or all descendants pruned"], ["pill", "line", "pruned steps, grouped"], ["hollow", "soft", "no score"]];
  legend.replaceChildren(
    ...(scores ? [make("span", {}, `score ${shownScore(scores.least)}`, make("i", { class: "ramp" }), shownScore(scores.most))] : []),
    ...[...always, ...seen].map(entry),
  );
}

export function showDetails(details, tree, i, onSelect) {
  if (i === null) return details.replaceChildren(make("p", { class: "note" }, "Click a step to read the path that leads to it."));
  const node = tree.nodes[i];
  const sources = node.sources.map((lineage) => {
    const button = make("button", { type: "button" }, lineage);
    const source = tree.byLineage.get(lineage);
    button.disabled = source === undefined; // a damaged file may name a step that it does not contain
    button.addEventListener("click", () => onSelect(source.i));
    return button;
  });
  const facts = [
    ["thought", node.thought ? "part of the thoughts, not of the answer" : null],
    ["state", node.state],
    ["ended by", node.stop ? node.stop.replace("_", " ") : node.parent === null ? null : "not decoded"],
    ["score", node.parent === null ? null : shownScore(node.score)],
    ["this step alone", node.step_score === null || node.step_score === node.score ? null : shownScore(node.step_score)],
    ["tokens", `${count(node.tokens)}, at positions ${count(node.start)} to ${count(node.start + node.tokens)}`],
    ["speculated", node.ahead ? `${plural(node.ahead, "token")} before it was selected` : null],
    ["KV", node.kv ?? null],
    ["written from", sources.length ? make("span", {}, ...sources) : null],
    ["children", node.children.length ? count(node.children.length) : null],
    ...Object.entries(node.notes),
  ].filter(([, value]) => value !== null);
  const list = make("dl", {}, ...facts.flatMap(([word, value]) => [make("dt", {}, word), make("dd", {}, value)]));
  const ramp = scoreColours();
  const steps = pathOf(tree, i).slice(1).map((step) => {
    const button = make("button", { type: "button", style: `--chip: ${ramp(tree.share(step.score)) ?? "var(--faint)"}` });
    if (step.i === i) button.setAttribute("aria-current", "step");
    const meta = `${step.thought ? "thought \u00b7 " : ""}round ${step.round} \u00b7 score ${shownScore(step.score)} \u00b7 ${plural(step.tokens, "token")}`;
    button.append(make("span", { class: "meta" }, meta), make("span", { class: "step" }, step.text.trim() || "(no text)"));
    button.addEventListener("click", () => onSelect(step.i));
    return make("li", {}, button);
  });
  details.replaceChildren(make("h3", {}, named(node)), list, make("ol", {}, ...steps));
  const current = details.querySelector("[aria-current]");
  details.scrollTop = current ? current.offsetTop - details.offsetTop - 120 : 0; // scrolls the panel, not the page
}
