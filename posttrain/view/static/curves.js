// Curves of metrics, one chart for each, with all runs that have it.

import { get, go } from "./api.js";
import { colour, el, field, number, select } from "./dom.js";

const FIRST = ["reward", "eval/reward", "loss", "eval/loss", "pass_rate", "completions/mean_length", "completions/clipped_ratio",
  "kl", "entropy", "grad_norm", "frac_mixed", "sampling/logp_difference/mean", "sampling/staleness/mean", "clip_ratio/region_mean"];
const MOST = 24;
const COLOURS = 6;
const WHOLE = [1, 2, 5].flatMap((digit) => Array.from({ length: 8 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);

export async function curves(given, runs) {
  const names = await get("metrics");
  const stages = [...new Set(names.flatMap((of) => Object.keys(of)))];
  const stage = stages.includes(given.stage) ? given.stage : stages.at(-1);
  const known = [...new Set(names.flatMap((of) => of[stage] ?? []))].sort();
  const wanted = (given.metrics ?? "").trim();
  const chosen = wanted ? known.filter((name) => wanted.split(/[\s,]+/).some((word) => name.includes(word)))
    : FIRST.filter((name) => known.includes(name));
  const change = (more) => go("curves", { ...given, stage, ...more });
  const bar = el("div", { class: "bar" },
    select("Stage", stages.map((name) => [name, name]), stage, (value) => change({ stage: value })),
    field(`Metrics (words of ${known.length} names)`, "search", wanted, (value) => change({ metrics: value }),
      { wide: true, placeholder: "reward kl completions/", list: "names" }),
    el("datalist", { id: "names" }, known.map((name) => el("option", { value: name }))),
    select("Smoothing", [["0", "none"], ["0.6", "0.6"], ["0.9", "0.9"], ["0.98", "0.98"]], given.smooth ?? "0",
      (value) => change({ smooth: value })));
  const legend = el("div", { class: "legend" }, runs.map((run) => {
    const mark = el("i");
    mark.style.background = colour(`run${run.run % COLOURS}`);
    return el("span", {}, mark, `${run.name} (${run.state})`);
  }));
  const charts = chosen.slice(0, MOST).map((name) => chart(name, stage, Number(given.smooth ?? 0)));
  const empty = charts.length ? null : el("p", { class: "quiet" }, stage ? "No metric has such a name." : "No metrics yet.");
  const more = chosen.length > MOST ? el("p", { class: "quiet" }, `The first ${MOST} of ${chosen.length}; give more letters.`) : null;
  const element = el("section", {}, bar, legend, el("div", { class: "charts" }, charts.map((one) => one.element)), empty, more);
  const refresh = () => charts.forEach((one) => one.load());
  return { element, refresh, shown: refresh };
}

function chart(name, stage, smooth) {
  const value = el("span", { class: "value" });
  const place = el("div");
  const element = el("div", { class: "chart", "data-metric": name }, el("h3", {}, `${name} `, value), place);
  let plot = null;
  async function load() {
    const found = await get("curves", { stage, name });
    const steps = [...new Set(found.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, position) => [step, position]));
    const columns = found.map((curve) => {
      const column = new Array(steps.length).fill(null);
      smoothed(curve.values, smooth).forEach((y, i) => { column[at.get(curve.steps[i])] = y; });
      return column;
    });
    value.replaceChildren(...found.map((curve) => {
      const last = el("span", {}, `${number(curve.values.at(-1))} `);
      last.style.color = colour(`run${curve.run % COLOURS}`);
      return last;
    }));
    plot?.destroy();
    plot = new uPlot(options(found, place.clientWidth || 320), [steps, ...columns], place);
  }
  return { element, load: () => load().catch((error) => { place.textContent = error.message; }) };
}

function options(found, width) {
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 },
    font: "11px system-ui, sans-serif" };
  return {
    width, height: 170, legend: { show: false }, cursor: { y: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => (low === high ? [low - 1, high + 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
    axes: [{ ...axis, size: 28, incrs: WHOLE }, { ...axis, size: 62, values: (_, ticks, axisIndex, space, gap) => ticks.map((tick) => label(tick, gap)) }],
    series: [{}, ...found.map((curve) => ({ stroke: colour(`run${curve.run % COLOURS}`), width: 1.5, spanGaps: true,
      points: { show: curve.steps.length < 30, size: 4 } }))],
  };
}

function label(tick, gap) {
  const decimals = Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9));
  if (tick === 0) return "0";
  return decimals > 4 || Math.abs(tick) >= 1e6 ? tick.toExponential(1) : tick.toFixed(decimals);
}

function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => (mean = mean === null ? value : weight * mean + (1 - weight) * value));
}
