// Curves of metrics, one chart for each, with all runs that have it.

import { address, get, go } from "./api.js";
import { colour, el, field, number, select } from "./dom.js";

const FIRST = ["reward", "eval/reward", /^rewards\/.+\/mean$/, /^eval\/rewards\/.+\/mean$/, "loss", "eval/loss", "eval/perplexity", "distill/kl", "eval/distill/kl",
  "rewards/accuracies", "rewards/margins", "pass_rate", "completions/mean_length", "completions/clipped_ratio", "kl", "entropy", "grad_norm",
  "frac_mixed", "sampling/logp_difference/mean", "sampling/staleness/mean", "clip_ratio/region_mean"];
const MOST = 24;
const COLOURS = 6;
const WHOLE = [1, 2, 5].flatMap((digit) => Array.from({ length: 8 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);
const MARGIN = 0.1;

export async function curves(given, runs) {
  let words = (given.metrics ?? "").trim(), charts = [], shown = null;
  const smooth = Number(given.smooth ?? 0);
  const names = await get("metrics");
  const stages = stagesOf(names);
  const stage = stages.includes(given.stage) ? given.stage : stages.at(-1);
  const change = (more) => go("curves", { ...given, stage, metrics: words, ...more });
  const search = field(`Metrics (words of ${known(names, stage).length} names)`, "search", words, () => {},
    { wide: true, placeholder: "reward kl completions/", list: "names", oninput: (event) => choose(event.target.value) });
  const bar = el("div", { class: "bar" },
    select("Stage", stages.map((name) => [name, name]), stage, (value) => change({ stage: value })), search,
    el("datalist", { id: "names" }, known(names, stage).map((name) => el("option", { value: name }))),
    select("Smoothing", [["0", "none"], ["0.6", "0.6"], ["0.9", "0.9"], ["0.98", "0.98"]], given.smooth ?? "0",
      (value) => change({ smooth: value })));
  const legend = el("div", { class: "legend" }), place = el("div", { class: "charts" }), note = el("p", { class: "quiet" });

  async function choose(text) {
    words = text.trim();
    history.replaceState(null, "", address("curves", { ...given, stage: given.stage, metrics: words }));
    await draw(await get("metrics"));
  }

  async function draw(names) {
    const chosen = chosenOf(known(names, stage), words);
    note.textContent = chosen.length > MOST ? `The first ${MOST} of ${chosen.length}; give more letters.`
      : chosen.length ? "" : stage ? "No metric has such a name." : "No metrics yet.";
    const asked = JSON.stringify(chosen);
    if (asked !== shown) {
      shown = asked;
      const before = new Map(charts.map((one) => [one.name, one]));
      charts = chosen.slice(0, MOST).map((name) => before.get(name) ?? chart(name, stage, smooth));
      place.replaceChildren(...charts.map((one) => one.element));
    }
    await Promise.all(charts.map((one) => one.load()));
  }

  function mark(current) {
    legend.replaceChildren(...current.map((run) => {
      const line = el("i");
      line.style.background = colour(`run${run.run % COLOURS}`);
      return el("span", { title: madeBy(run.versions) }, line, `${run.name} (${[run.state, short(run.versions)].filter(Boolean).join(", ")})`);
    }));
  }

  async function refresh(current) {
    mark(current);
    const names = await get("metrics");
    await draw(names);
  }

  mark(runs);
  return { element: el("section", {}, bar, legend, place, note), refresh, shown: () => draw(names) };
}

// Versions of the last call in a few words, and of each call in full.
function short(versions) {
  const last = versions.at(-1) ?? {};
  return ["posttrain", "jax"].filter((name) => last[name]).map((name) => `${name} ${last[name]}`).join(", ");
}

function madeBy(versions) {
  return versions.map((call) => Object.entries(call).map(([name, version]) => `${name} ${version}`).join(", ")).join("\n");
}

function stagesOf(names) {
  return [...new Set(names.flatMap((of) => Object.keys(of)))];
}

function known(names, stage) {
  return [...new Set(names.flatMap((of) => of[stage] ?? []))].sort();
}

function chosenOf(known, words) {
  if (words) return known.filter((name) => words.split(/[\s,]+/).some((word) => name.includes(word)));
  return FIRST.flatMap((one) => known.filter((name) => (one instanceof RegExp ? one.test(name) : one === name)));
}

function chart(name, stage, smooth) {
  const value = el("span", { class: "value" });
  const place = el("div");
  const element = el("div", { class: "chart", "data-metric": name }, el("h3", {}, `${name} `, value), place);
  let plot = null, found = [];

  function head() {
    const step = plot === null || plot.cursor.idx == null ? null : plot.data[0][plot.cursor.idx]; // under the pointer
    const parts = found.map((curve) => {
      const position = step === null ? curve.values.length - 1 : curve.steps.indexOf(step);
      const part = el("span", {}, position < 0 ? "– " : `${number(curve.values[position])} `);
      part.style.color = colour(`run${curve.run % COLOURS}`);
      return part;
    });
    const width = Math.max(...found.map((curve) => curve.width));
    value.replaceChildren(...parts, step === null ? "" : width > 1 ? `at step ${step}, means of up to ${width} steps` : `at step ${step}`);
  }

  async function load() {
    found = await get("curves", { stage, name });
    const steps = [...new Set(found.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, position) => [step, position]));
    const columns = found.map((curve) => {
      const column = new Array(steps.length).fill(null);
      smoothed(curve.values, smooth).forEach((y, i) => { column[at.get(curve.steps[i])] = y; });
      return column;
    });
    const data = [steps, ...columns];
    if (plot && plot.series.length === data.length) {
      const enlarged = plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1);
      plot.setData(data, !enlarged);
      if (enlarged) plot.redraw();
      return head();
    }
    plot?.destroy();
    plot = new uPlot(options(found, place.clientWidth || 320, head), data, place);
    head();
  }
  return { name, element, load: () => load().catch((error) => { place.textContent = error.message; }) };
}

function options(found, width, chosen) {
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 },
    font: "11px system-ui, sans-serif" };
  return {
    width, height: 170, legend: { show: false }, cursor: { y: false, sync: { key: "step" } },
    hooks: { setCursor: [chosen] },
    scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high) } },
    axes: [{ ...axis, size: 28, incrs: WHOLE }, { ...axis, size: 62, values: (_, ticks, axisIndex, space, gap) => ticks.map((tick) => label(tick, gap)) }],
    series: [{}, ...found.map((curve) => ({ stroke: colour(`run${curve.run % COLOURS}`), width: 1.5, spanGaps: true,
      points: { show: curve.steps.length < 30, size: 4 } }))],
  };
}

function rangeOf(low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, MARGIN, true);
  return low === 0 ? [0, 1] : [low - MARGIN * Math.abs(low), low + MARGIN * Math.abs(low)];
}

function label(tick, gap) {
  if (tick === 0) return "0";
  if (gap < 1e-4 || Math.abs(tick) >= 1e6) return String(Number(tick.toPrecision(6))).replace("e+", "e");
  let decimals = 0;
  while (Math.abs(gap - gap.toFixed(decimals)) > gap * 1e-6) decimals++; // a gap of 2.5 has one, of 0.25 two
  return tick.toFixed(decimals);
}

function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => (mean = mean === null ? value : weight * mean + (1 - weight) * value));
}
