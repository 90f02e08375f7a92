// The page: what was asked and answered, the panels, and one selected step for all of them.

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

function showTreeLegend(tree) {
  const entry = (kind, name, ...words) => make("span", {}, make("i", { class: kind, style: `--c: var(--${name})` }), ...words);
  const { scores } = tree;
  element("tree-legend").replaceChildren(
    ...(scores ? [make("span", {}, `score ${shownScore(scores.least)}`, make("i", { class: "ramp" }), shownScore(scores.most))] : []),
    entry("path", "accent", "chosen path"),
    entry("ring", "soft", "finished"),
    entry("dot faded", "score-1", "pruned, or led nowhere"),
    entry("pill", "line", "pruned steps, grouped"),
    entry("hollow", "soft", "no score"),
  );
}

function showDetails(tree, i, onSelect) {
  const details = element("details");
  if (i === null) return details.replaceChildren(make("p", { class: "note" }, "Click a step to read the path that leads to it."));
  const node = tree.nodes[i];
  const facts = [
    ["state", node.state],
    ["ended by", node.stop ? node.stop.replace("_", " ") : node.parent === null ? null : "not decoded"],
    ["score", node.parent === null ? null : shownScore(node.score)],
    ["this step alone", node.step_score === null || node.step_score === node.score ? null : shownScore(node.step_score)],
    ["tokens", `${count(node.tokens)}, at positions ${count(node.start)} to ${count(node.start + node.tokens)}`],
    ["children", node.children.length ? count(node.children.length) : null],
    ...Object.entries(node.notes),
  ].filter(([, value]) => value !== null);
  const list = make("dl", {}, ...facts.flatMap(([word, value]) => [make("dt", {}, word), make("dd", {}, value)]));
  const ramp = scoreColours();
  const steps = pathOf(tree, i).slice(1).map((step) => {
    const button = make("button", { type: "button", style: `--chip: ${ramp(tree.share(step.score)) ?? "var(--faint)"}` });
    if (step.i === i) button.setAttribute("aria-current", "step");
    const meta = `round ${step.round} \u00b7 score ${shownScore(step.score)} \u00b7 ${plural(step.tokens, "token")}`;
    button.append(make("span", { class: "meta" }, meta), make("span", { class: "step" }, step.text.trim() || "(no text)"));
    button.addEventListener("click", () => onSelect(step.i));
    return make("li", {}, button);
  });
  details.replaceChildren(make("h3", {}, node.parent === null ? `${node.lineage} \u00b7 prompt` : node.lineage), list, make("ol", {}, ...steps));
  const current = details.querySelector("[aria-current]");
  details.scrollTop = current ? current.offsetTop - details.offsetTop - 120 : 0; // never the page itself
}

function start() {
  const { trees, timeline } = DATA;
  trees.forEach(prepare);
  const known = new Set(trees.flatMap((tree) => tree.nodes.map((node) => node.lineage)));
  const others = Object.keys(timeline.residences).filter((segment) => !known.has(segment));
  let tree = null;
  const select = (i) => {
    treePanel.select(i);
    timePanel.select(i);
    showDetails(tree, i, select);
  };
  const treePanel = new TreePanel(select);
  const roundsPanel = new RoundsPanel(select);
  const timePanel = new TimePanel(timeline, select);
  const show = (shown) => {
    tree = shown;
    showOpening(tree);
    showTreeLegend(tree);
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
