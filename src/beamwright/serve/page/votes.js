// The vote's histogram: what the final candidates state, and how often.

import { count, make, plural, shortened, shownScore } from "./common.js";

const MOST = 12;

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
  list.replaceChildren(...found.slice(0, MOST).map((ballot) => {
    const bar = make("i");
    bar.style.width = `${(100 * ballot.nodes.length) / most}%`;
    const amount = `${plural(ballot.nodes.length, "candidate")}, scores add up to ${shownScore(ballot.sum)}`;
    const said = make("span", { class: "said" }, ballot.said === null ? "(no answer stated)" : shortened(ballot.said, 200));
    const button = make("button", { type: "button", class: ballot.chosen ? "chosen" : "" }, said, make("span", { class: "track" }, bar), make("span", { class: "amount" }, amount));
    button.addEventListener("click", () => onSelect(ballot.best.i));
    return make("li", {}, button);
  }));
  const rest = found.length - MOST;
  note.textContent = !found.length ? "No candidate is final yet." : rest > 0 ? `and ${count(rest)} other answers` : "";
}
