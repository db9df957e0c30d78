// Table of rollouts: filtered, searched, sorted and paged by the server.

import { get, go } from "./api.js";
import { el, field, number, select, sign } from "./dom.js";

const PAGE = 50;

export const NONE = "This run has no rollouts yet; those of supervised fine-tuning and of reward models have none.";

export function recorded(run) {
  return run.stages.some((stage) => stage.indexed);
}

export function place(given, runs) {
  const run = runs[Number(given.run)] ?? runs.find(recorded) ?? runs[0];
  const stages = run.stages.filter((stage) => stage.indexed);
  const stage = stages.find((one) => one.name === given.stage) ?? stages.at(-1) ?? null;
  return { run, stages, stage };
}

export function placeFields({ run, stages, stage }, runs, change) {
  return [
    runs.length > 1 ? select("Run", runs.map((one) => [one.run, one.name]), run.run, (value) => change({ run: value, stage: "" })) : null,
    stage === null ? null : select("Stage", stages.map((one) => [one.name, one.name]), stage.name, (value) => change({ stage: value })),
  ];
}

export async function rollouts(given, runs) {
  const at = place(given, runs);
  const change = (more) => go("rollouts", { ...given, offset: "", ...more });
  if (at.stage === null) return { element: el("section", {}, el("div", { class: "bar" }, placeFields(at, runs, change)), el("p", { class: "quiet" }, NONE)) };
  const functions = at.stage.indexed.rewards ?? [];
  const bar = el("div", { class: "bar" }, placeFields(at, runs, change), filters(given, at.stage, change));
  const table = el("div", { class: "scroll" });
  const pages = el("div", { class: "pages" });
  const offset = Number(given.offset ?? 0);

  async function load() {
    const found = await get("rollouts", { ...given, run: at.run.run, stage: at.stage.name, limit: PAGE });
    table.replaceChildren(tableOf(found.rows, functions, given, at.run.run, change));
    const last = Math.min(offset + PAGE, found.total);
    const step = (to) => () => go("rollouts", { ...given, offset: to || "" });
    pages.replaceChildren(
      el("button", { disabled: offset === 0, onclick: step(Math.max(0, offset - PAGE)) }, "Back"),
      el("span", { id: "count" }, found.total ? `${number(offset + 1)} to ${number(last)} of ${number(found.total)}` : "none"),
      el("button", { disabled: last >= found.total, onclick: step(offset + PAGE) }, "Next"));
  }
  await load();
  return { element: el("section", {}, bar, table, pages), refresh: () => load().catch(() => {}) };
}

function filters(given, stage, change) {
  const numeric = (label, name) => field(label, "number", given[name], (value) => change({ [name]: value }), { step: "any" });
  const stops = (stage.indexed.stops ?? []).map((stop) => [stop, stop]);
  return [
    numeric("Step from", "step_min"), numeric("Step to", "step_max"),
    numeric("Reward from", "reward_min"), numeric("Reward to", "reward_max"),
    numeric("Dataset row", "row"),
    select("Stop", [["", "any"], ...stops], given.stop ?? "", (value) => change({ stop: value })),
    field("Text", "search", given.text, (value) => change({ text: value }), { wide: true, placeholder: "in prompts and completions" }),
  ];
}

function tableOf(rows, functions, given, run, change) {
  const sort = given.sort || "step";
  const head = (title, name, numeric = true) => {
    const mark = sort === name ? (given.order === "asc" ? " ↑" : " ↓") : "";
    const order = sort === name && given.order !== "asc" ? "asc" : "";
    const button = el("button", { onclick: () => change({ sort: name, order }) }, title + mark);
    return el("th", { class: numeric ? "num" : null, "aria-sort": mark ? (order ? "descending" : "ascending") : null }, button);
  };
  const several = functions.length > 1;
  const header = el("tr", {}, head("step", "step"), el("th", {}, "prompt"), el("th", {}, "completion"), head("reward", "reward"),
    several ? functions.map((name) => head(name, `rewards/${name}`)) : null,
    head("advantage", "advantage"), head("staleness", "staleness"), head("tokens", "sampled_tokens"), head("stop", "stop", false));
  const cell = (name, value, kind = "") => el("td", { class: `num ${kind}`, "data-name": name }, number(value));
  const body = rows.map((row) => {
    const open = () => go("rollout", { run, id: row.id });
    return el("tr", { class: "link", tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      cell("step", row.step), el("td", { class: "text" }, el("div", {}, row.prompt ?? "")),
      el("td", { class: "text" }, el("div", {}, row.completion ?? "")), cell("reward", row.reward),
      several ? functions.map((name) => cell(name, row.rewards[name])) : null,
      cell("advantage", row.advantage, sign(row.advantage)), cell("staleness", row.staleness), cell("tokens", row.sampled_tokens),
      el("td", { class: "fact", "data-name": "stop" }, row.stop ?? ""));
  });
  return el("table", { class: "cards" }, el("thead", {}, header), el("tbody", {}, body));
}
