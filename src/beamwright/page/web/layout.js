// Layout of a tree, without drawing: one row per leaf, in depth-first order.

export const LARGE = 300; // from this number of nodes on, pruned siblings are first drawn as one mark

// Adds to the data what the drawings need: children, depth, whether a node is alive, the chosen path, scores.
// In `tree.nodes`, parents stand before children. Call it again after nodes were added.
export function prepare(tree) {
  const nodes = tree.nodes;
  nodes.forEach((node, i) => {
    Object.assign(node, { i, children: [], depth: node.parent === null ? 0 : nodes[node.parent].depth + 1, alive: false, chosen: false });
    if (node.parent !== null) nodes[node.parent].children.push(i);
  });
  for (let i = nodes.length - 1; i >= 0; i--) {
    const node = nodes[i];
    const tip = node.state === "kept" && !node.children.length;
    node.alive = tip || ["finished", "candidate", "open"].includes(node.state) || node.children.some((child) => nodes[child].alive);
  }
  for (let at = tree.chosen; at !== null; at = nodes[at].parent) nodes[at].chosen = true;
  let [least, most] = [Infinity, -Infinity];
  for (const { score } of nodes) if (score !== null) [least, most] = [Math.min(least, score), Math.max(most, score)];
  tree.scores = least <= most ? { least, most } : null;
  tree.share = (score) => (score === null ? null : most > least ? (score - least) / (most - least) : 1);
  tree.depth = nodes.reduce((deepest, node) => Math.max(deepest, node.depth), 0);
  tree.lastRound = nodes.reduce((last, node) => Math.max(last, node.round), 0); // the last round may be incomplete
  tree.opened ??= new Set(); // parents whose pruned children the user wants to see one by one
}

export function pathOf(tree, i) {
  const path = [];
  for (let at = i; at !== null; at = tree.nodes[at].parent) path.unshift(tree.nodes[at]);
  return path;
}

export const named = (node) => (node.parent === null ? [node.lineage, "prompt"].filter(Boolean).join(" \u00b7 ") : node.lineage);

function depthFirst(tree) {
  const [order, stack] = [[], tree.nodes.length ? [0] : []];
  while (stack.length) {
    const node = tree.nodes[stack.pop()];
    order.push(node);
    for (let i = node.children.length - 1; i >= 0; i--) stack.push(node.children[i]);
  }
  return order;
}

// Visible items in depth-first order: nodes {node, row} and marks {parent, hidden, best, row}.
export function layOut(tree, mode) {
  const items = [];
  const itemOf = new Map();
  const marks = new Map();
  const shown = new Array(tree.nodes.length).fill(false);
  for (const node of depthFirst(tree)) {
    const parent = node.parent === null ? null : tree.nodes[node.parent];
    if (parent !== null && !shown[parent.i]) {
      if (marks.has(parent.i)) marks.set(node.i, marks.get(parent.i)), addHidden(marks.get(parent.i), node);
      continue;
    }
    const dead = parent !== null && !node.alive;
    if (dead && mode === "hide") continue;
    if (dead && mode === "group" && parent.alive && !tree.opened.has(parent.i) && numDead(tree, parent) > 1) {
      if (!itemOf.has(`+${parent.i}`)) {
        const mark = { parent, hidden: 0, best: null, depth: node.depth, children: [] };
        itemOf.set(`+${parent.i}`, mark);
        items.push(mark);
        itemOf.get(parent.i).children.push(mark);
      }
      marks.set(node.i, itemOf.get(`+${parent.i}`));
      addHidden(marks.get(node.i), node);
      continue;
    }
    shown[node.i] = true;
    const item = { node, depth: node.depth, children: [] };
    itemOf.set(node.i, item);
    items.push(item);
    if (parent !== null) itemOf.get(parent.i).children.push(item);
  }
  let rows = 0;
  for (const item of items) if (!item.children.length) item.row = rows++;
  for (let i = items.length - 1; i >= 0; i--) {
    const { children } = items[i];
    if (children.length) items[i].row = (children[0].row + children.at(-1).row) / 2;
  }
  return { items, itemOf, rows };
}

const numDead = (tree, parent) => parent.children.reduce((sum, child) => sum + !tree.nodes[child].alive, 0);

function addHidden(mark, node) {
  mark.hidden += 1;
  if (node.score !== null && (mark.best === null || node.score > mark.best)) mark.best = node.score;
}
