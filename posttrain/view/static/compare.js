// Two steps side by side, of one run or two: means, and samples of the prompts that both have.

import { address, get, go } from "./api.js";
import { el, number, select, sign } from "./dom.js";
import { NONE, recorded } from "./rollouts.js";

const MOST = 40;

export async function compare(given, runs) {
  const sides = ["", "2"].map((suffix) => side(given, runs, suffix));
  const whole = sides.every((one) => one.stage);
  if (whole && !given.step && sides[0].run === sides[1].run) sides[0].step = sides[0].steps.at(-1);
  const asked = Object.fromEntries(sides.flatMap((one) => ["run", "stage", "step"].map((name) => [name + one.suffix, one[name]])));
  const change = (more) => go("compare", { ...asked, ...more });
  const bars = el("div", { class: "pair" }, sides.map((one) => el("div", {}, el("div", { class: "bar" }, fields(one, runs, change)),
    one.stage ? null : el("p", { class: "quiet" }, NONE))));
  if (!whole) return { element: el("section", {}, bars) };
  const found = await get("compare", asked);
  const choices = found.map((one, i) => (one.whole ? null : el("p", { class: "quiet" },
    `${i ? "Right" : "Left"}: the record of step ${one.step} is gone; below are those of its samples that samples.jsonl has, and means as they were logged.`)));
  return { element: el("section", {}, bars, choices, means(found), samples(found, sides)) };
}

function side(given, runs, suffix) {
  const others = runs.filter(recorded);
  const run = runs[Number(given[`run${suffix}`])] ?? (suffix && others.length > 1 ? others[1] : others[0] ?? runs[0]);
  const stages = run.stages.filter((stage) => stage.indexed);
  const stage = stages.find((one) => one.name === given[`stage${suffix}`]) ?? stages.at(-1);
  const steps = stage?.indexed.steps ?? []; // newest first
  const step = given[`step${suffix}`] || steps[0];
  return { suffix, run: run.run, stage: stage?.name, step, stages, steps };
}

function fields(one, runs, change) {
  const set = (name, more = {}) => (value) => change({ [name + one.suffix]: value, ...more });
  return [
    runs.length > 1 ? select("Run", runs.map((run) => [run.run, run.name]), one.run, set("run", { [`stage${one.suffix}`]: "", [`step${one.suffix}`]: "" })) : null,
    one.stages.length > 1 ? select("Stage", one.stages.map((stage) => [stage.name, stage.name]), one.stage, set("stage", { [`step${one.suffix}`]: "" })) : null,
    one.steps.length ? select("Step", one.steps.map((step) => [step, step]), one.step, set("step")) : null,
  ];
}

function means([left, right]) {
  const names = [...new Set([...Object.keys(left.means), ...Object.keys(right.means)])];
  const rows = names.map((name) => {
    const [a, b] = [left.means[name] ?? null, right.means[name] ?? null];
    const difference = a === null || b === null ? null : b - a;
    return el("tr", {}, el("td", {}, name), el("td", { class: "num" }, number(a)), el("td", { class: "num" }, number(b)),
      el("td", { class: `num ${name.startsWith("reward") ? sign(difference) : ""}` }, number(difference)));
  });
  const head = el("tr", {}, el("th", {}, "mean"), ["left", "right", "difference"].map((name) => el("th", { class: "num" }, name)));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
}

function samples(found, sides) {
  const byRow = found.map((one) => Map.groupBy(one.samples, (sample) => sample.row));
  const both = [...byRow[0].keys()].filter((row) => row !== null && byRow[1].has(row));
  const note = both.length ? `${both.length} prompt(s) are in both steps.` : "No prompt is in both steps; each has its own below.";
  const rows = both.length ? both.map((row) => [row, row])
    : Array.from({ length: Math.max(byRow[0].size, byRow[1].size) }, (_, i) => byRow.map((of) => [...of.keys()][i]));
  const blocks = rows.slice(0, MOST).map((pair) => el("div", { class: "pair" }, pair.map((row, i) => column(byRow[i].get(row), sides[i].run))));
  return el("div", {}, el("h2", {}, "Samples"), el("p", { class: "quiet" }, note), blocks);
}

function column(samples, run) {
  if (!samples) return el("div");
  const own = samples.map((sample) => el("div", { class: `sample ${sign(sample.advantage)}` },
    el("a", { href: address("rollout", { run, id: sample.id }) }, number(sample.reward, 3)), ` ${sample.completion ?? ""}`));
  return el("div", { class: "piece" }, el("h3", {}, `${typeof samples[0].row === "number" ? `row ${samples[0].row}: ` : ""}${samples[0].prompt ?? ""}`), own);
}
