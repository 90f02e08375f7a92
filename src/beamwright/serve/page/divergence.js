// Where two searches part: the first step, by round and then by lineage, that is not the same.

const TELLING = 1e-4; // scores that are closer than this may differ by the order of computing alone

function difference(a, b) {
  if (!a || !b) return "opened in one of them only";
  if (a.text !== b.text || a.tokens !== b.tokens) return "another text";
  if ((a.score === null) !== (b.score === null) || Math.abs(a.score - b.score) > TELLING) return `scores ${a.score} and ${b.score}`;
  return a.state === b.state ? null : `${a.state} in the one, ${b.state} in the other`;
}

function before(one, other) {
  const [a, b] = [one, other].map((lineage) => lineage.split(".").map(Number));
  for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return a[i] < b[i];
  return a.length < b.length;
}

// {lineage, round, why}, or null where they are the same as far as both have come.
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
