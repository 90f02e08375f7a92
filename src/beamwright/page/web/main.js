// The page: submits problems, follows searches, and shows one or two of them, live or saved.

import { connectZoomButtons, count, element, make, oneLine, shortened, shownScore, shownSeconds } from "./common.js";
import { fetched, request, sent } from "./api.js";
import { Gauges, Replay, showVotes } from "./controls.js";
import { showDetails, showTreeLegend } from "./details.js";
import { exportJson, exportSvg } from "./export.js";
import { Pane, firstDivergence } from "./pane.js";
import { RoundsPanel } from "./rounds.js";

const LIST_EVERY_MS = 2000;
const TYPING = "input, textarea, select";

class Page {
  constructor() {
    this.asked = false; // true while a redraw is scheduled
    this.following = true; // shows the newest search; false: the search that the user picked
    this.mode = null; // how pruned steps are drawn; null: depends on the size of the tree
    this.pane = new Pane(element("tree"), () => this.ask(), (i) => this.select(i));
    this.other = new Pane(element("other-tree"), () => this.ask(), (i) => this.select(this.pane.tree.byLineage.get(this.other.tree.nodes[i].lineage)?.i ?? null, this.other.tree.nodes[i].lineage));
    this.rounds = new RoundsPanel((i) => this.select(i));
    this.rounds.show(this.pane.tree);
    this.replay = new Replay(() => this.ask());
    this.listen();
  }
  get panels() { return [this.pane.panel, this.other.panel]; }

  // --- what is shown ---------------------------------------------------------------------------
  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.show(); });
  }
  show() {
    const { pane, other, replay } = this;
    const rounds = Math.max(pane.run?.rounds ?? 0, other.run?.rounds ?? 0);
    replay.set(rounds);
    for (const each of [pane, other]) each.show(replay.round, this.mode);
    const { tree } = pane;
    if (tree.chosen !== null && pane.panel.selected === null && !this.touched) pane.panel.select(tree.chosen);
    this.showOpening(tree);
    this.showControls(tree);
    this.showDivergence();
    const select = (i) => this.select(i);
    showDetails(element("details"), tree, pane.panel.selected, select);
    showVotes(element("votes"), element("votes-note"), tree, select);
    this.rounds.show(tree);
  }
  showOpening(tree) {
    const answer = element("answer");
    element("problem").textContent = tree.problem || (tree.about ? "(no text)" : "");
    const state = { failed: "The search failed.", cancelled: "The search was stopped.", done: "The chosen candidate states no answer.", saved: "No answer was recorded." }[tree.over];
    answer.textContent = tree.answer ?? state ?? (tree.about === null ? "" : tree.rounds ? "searching \u2026" : "waiting \u2026");
    answer.classList.toggle("missing", tree.answer === null);
    const chosen = tree.chosen === null ? null : tree.nodes[tree.chosen];
    element("answer-note").textContent = [chosen && `candidate ${chosen.lineage}, score ${shownScore(chosen.score)}`, tree.reason_fewer, tree.error].filter(Boolean).join("; ");
    const warning = element("answer-warning");
    warning.hidden = tree.warnings.length === 0;
    if (warning.textContent !== tree.warnings.join("\n")) warning.textContent = tree.warnings.join("\n");
    const steps = tree.nodes.filter((node) => node.parent !== null && node.state !== "open");
    const inState = (...states) => count(steps.filter((node) => states.includes(node.state)).length);
    const about = tree.about ?? {};
    const figures = [
      ["method", about.method],
      ["n", about.n],
      ["rounds", count(tree.rounds)],
      ["steps", count(steps.length)],
      ["pruned", inState("pruned")],
      ["final candidates", inState("finished", "candidate")],
      ["tokens in the prompt", tree.nodes.length ? count(tree.nodes[0].tokens) : null],
      ["tokens", count(tree.tokens || steps.reduce((sum, node) => sum + node.tokens, 0))],
      ["speculated", tree.stats?.speculation?.tokens ? `${count(tree.stats.speculation.kept)} kept of ${count(tree.stats.speculation.tokens)}` : null],
      ["time", tree.elapsed_s === null ? null : shownSeconds(tree.elapsed_s)],
      ["tokens per second", tree.elapsed_s ? count(Math.round(tree.tokens / tree.elapsed_s)) : null],
    ].filter(([, value]) => value !== null && value !== undefined);
    element("figures").replaceChildren(...figures.map(([word, value]) => make("div", {}, make("dt", {}, word), make("dd", {}, String(value)))));
  }
  showControls(tree) {
    const [hasKv, hasAhead] = [tree.nodes.some((node) => node.kv), tree.nodes.some((node) => node.ahead)];
    if (hasKv) element("colouring").hidden = false;
    const places = [["dot", "device", "KV on the device"], ["dot", "both", "on both"], ["dot", "host", "on the host"]];
    showTreeLegend(element("tree-legend"), tree, [
      ...(hasAhead ? [["ring dashed", "both", "speculated"]] : []),
      ...(this.pane.panel.colouring === "kv" ? places : []),
      ...(this.pane.panel.marked === null ? [] : [["diamond", "accent", "first divergence"]]),
    ]);
    const checked = document.querySelector(`[name="pruned"][value="${this.pane.panel.mode}"]`);
    if (checked) checked.checked = true;
    element("stop").hidden = this.pane.run === null || this.pane.run.over || !this.asks;
    element("threshold").disabled = tree.scores === null;
    this.setThreshold();
  }
  setThreshold() {
    const share = Number(element("threshold").value) / 100;
    const { scores } = this.pane.tree;
    const threshold = share === 0 || !scores ? null : scores.least + share * (scores.most - scores.least);
    for (const panel of this.panels) { panel.threshold = threshold; panel.view.ask(); }
    element("threshold-shown").textContent = threshold === null ? "off" : shownScore(threshold);
  }
  showDivergence() {
    const note = element("divergence");
    note.hidden = this.other.run === null;
    if (note.hidden) return;
    const found = firstDivergence(this.pane.tree, this.other.tree);
    for (const { panel, tree } of [this.pane, this.other]) panel.marked = (found && tree.byLineage.get(found.lineage)?.i) ?? null;
    note.textContent = found ? `The trees first differ in round ${found.round}, at ${found.lineage}: ${found.why}.` : "The trees are equal so far.";
  }
  // lineage: the lineage of the step, needed if only the other search has the step.
  select(i, lineage = i === null ? null : this.pane.tree.nodes[i].lineage) {
    this.touched = true;
    if (this.following && this.pane.run !== null) this.pick(this.pane.run.id); // the user reads this search, so do not switch to a newer one
    this.pane.panel.select(i);
    if (this.other.run !== null) this.other.selectLineage(lineage);
    const shown = i === null && lineage !== null ? this.other : this.pane;
    showDetails(element("details"), shown.tree, shown.panel.selected, (to) => this.select(shown === this.pane ? to : this.pane.tree.byLineage.get(shown.tree.nodes[to].lineage)?.i ?? null, shown.tree.nodes[to].lineage));
  }

  // --- which searches --------------------------------------------------------------------------
  // id: the search to show; "" to always show the newest.
  pick(id) {
    this.following = id === "";
    element("run").value = id;
    const place = this.following ? location.pathname : `#${encodeURIComponent(id)}`;
    if (location.protocol !== "about:") history.replaceState(null, "", place); // a frame in a notebook has no history
  }
  async open(id) {
    this.touched = false;
    this.replay.follow();
    await this.watch(this.pane, id);
  }
  // Takes the list of searches, the newest first.
  follow([newest]) {
    if (this.following && newest && newest.id !== this.pane.run?.id) this.open(newest.id);
  }
  async beside(id) {
    element("other-box").hidden = !id;
    if (id) await this.watch(this.other, id);
    else { this.other.clear(); this.pane.panel.marked = null; this.ask(); }
  }
  async watch(pane, id) {
    try {
      await pane.open(id);
    } catch (error) {
      if (error.name !== "AbortError") this.complain(error);
    }
  }
  async list() {
    const { asks, methods, searches } = await fetched("/feed/searches");
    this.asks = asks;
    element("ask").hidden = !asks;
    element("runs").hidden = !asks && searches.length < 2;
    const method = element("ask-method");
    if (asks && method.options.length === 1) method.append(...methods.map((name) => make("option", { value: name }, name)));
    const named = ({ id, problem, method: by, n, state }) => make("option", { value: id }, `${shortened(oneLine(problem) || id, 70)} \u00b7 ${[by, n && `n ${n}`, state].filter(Boolean).join(", ")}`);
    for (const [choice, first] of [[element("run"), asks ? "newest" : ""], [element("other"), "none"]]) {
      const chosen = choice.value;
      if (document.activeElement === choice) continue; // do not change a list that is open
      choice.replaceChildren(...(first ? [make("option", { value: "" }, first)] : []), ...searches.map(named));
      choice.value = chosen;
    }
    if (asks) this.follow(searches);
    return searches;
  }
  complain(error) {
    const note = element("problem-note");
    note.hidden = error === null;
    note.textContent = error?.message ?? "";
  }

  // --- what is done ----------------------------------------------------------------------------
  async submit() {
    const options = {};
    for (const input of element("ask").querySelectorAll("[data-option]")) {
      if (input.value !== "") options[input.dataset.option] = input.type === "number" ? Number(input.value) : input.value;
    }
    element("ask-go").disabled = true;
    this.complain(null);
    try {
      const { id } = await sent("/feed/searches", { problem: element("ask-problem").value, options });
      this.following = false;
      await this.list();
      this.pick(id);
      this.open(id);
    } catch (error) {
      this.complain(error);
    }
    element("ask-go").disabled = false;
  }
  listen() {
    const on = (id, event, act) => element(id).addEventListener(event, act);
    on("ask", "submit", (event) => { event.preventDefault(); this.submit(); });
    on("ask-problem", "keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.submit(); });
    on("stop", "click", () => request(`/feed/searches/${encodeURIComponent(this.pane.run.id)}`, { method: "DELETE" }).catch((error) => this.complain(error)));
    on("run", "change", () => {
      const id = element("run").value;
      this.pick(id);
      if (id) this.open(id);
      else this.list().catch((error) => this.complain(error));
    });
    on("other", "change", () => this.beside(element("other").value));
    on("threshold", "input", () => this.setThreshold());
    on("export-json", "click", () => this.pane.run && exportJson(this.pane.run));
    on("export-svg", "click", () => this.pane.run && exportSvg(this.pane.run, this.pane.panel));
    for (const radio of document.querySelectorAll('[name="pruned"]')) {
      radio.addEventListener("change", () => { this.mode = radio.value; this.pane.tree.opened.clear(); this.ask(); });
    }
    for (const radio of document.querySelectorAll('[name="colouring"]')) {
      radio.addEventListener("change", () => { for (const panel of this.panels) panel.colouring = radio.value; this.ask(); });
    }
    for (const panel of this.panels) connectZoomButtons("tree", panel.view);
    document.addEventListener("keydown", (event) => this.key(event));
  }
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key === "Escape") return event.target.blur();
    if (event.target.matches(TYPING)) return;
    if (event.key === "/" && this.asks) {
      event.preventDefault();
      return element("ask-problem").focus();
    }
    const act = event.target.matches("canvas") ? null : this.pane.panel.key(event.key);
    if (!act) return;
    event.preventDefault();
    act();
    element("tree").focus({ preventScroll: true });
  }
  async start() {
    const wanted = decodeURIComponent(location.hash.slice(1));
    this.following = wanted === "";
    const searches = await this.list();
    const picked = searches.find(({ id }) => id === wanted) ?? (this.asks ? undefined : searches[0]);
    this.pick(picked?.id ?? "");
    if (picked) this.open(picked.id);
    else { this.follow(searches); this.ask(); }
    element("gauges").hidden = !this.asks;
    if (!this.asks) return; // saved runs do not change
    new Gauges(element("gauges")).start();
    setInterval(() => { if (!document.hidden) this.list().catch(() => {}); }, LIST_EVERY_MS);
  }
}

const page = (window.beamwright = new Page()); // for debugging in the console
page.start().catch((error) => page.complain(error));
