// Prompts by pass rate over time: those that are never solved, always solved, or got worse.

import { get, go } from "./api.js";
import { colour, el, number, select, sign } from "./dom.js";
import { NONE, place, placeFields } from "./rollouts.js";

const PAGE = 50;
const ORDERS = { "rate asc": "hardest first", "rate desc": "easiest first", "change asc": "got worse", "change desc": "got better", "count desc": "most samples", "row asc": "dataset row" };

export async function prompts(given, runs) {
  const at = place(given, runs);
  const sort = given.sort ?? "rate", order = given.order ?? "asc", offset = Number(given.offset ?? 0);
  const change = (more) => go("prompts", { ...given, offset: "", ...more });
  if (at.stage === null) return { element: el("section", {}, el("div", { class: "bar" }, placeFields(at, runs, change)), el("p", { class: "quiet" }, NONE)) };
  const found = await get("prompts", { ...given, run: at.run.run, stage: at.stage.name, sort, order, limit: PAGE });
  const bar = el("div", { class: "bar" }, placeFields(at, runs, change),
    select("Order", Object.entries(ORDERS), `${sort} ${order}`, (value) => {
      const [by, direction] = value.split(" ");
      change({ sort: by, order: direction });
    }));
  const steps = found.bins.length > 1 ? `Each square is ${found.bins[1] - found.bins[0]} step(s) from step ${found.bins[0]} on; green passes, red fails. ` : "";
  const note = el("p", { class: "quiet" }, `${steps}A sample passes with a reward above ${at.stage.pass_above}.`);
  const rows = found.rows.map((row) => {
    const open = () => go("rollouts", { run: at.run.run, stage: at.stage.name, row: row.row });
    return el("tr", { class: "link", tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      el("td", { class: "num", "data-name": "row" }, row.row), el("td", { class: "text" }, el("div", {}, row.prompt ?? "")),
      el("td", { class: "num", "data-name": "samples" }, number(row.count)),
      el("td", { class: "num", "data-name": "pass rate" }, percent(row.rate)),
      el("td", { class: `num ${sign(row.change)}`, "data-name": "change" }, percent(row.change)),
      el("td", {}, cells(row.bins, found.bins)));
  });
  const head = el("tr", {}, el("th", { class: "num" }, "row"), el("th", {}, "prompt"), ["samples", "pass rate", "change"].map((name) => el("th", { class: "num" }, name)), el("th", {}, "over time"));
  const last = Math.min(offset + PAGE, found.total);
  const pages = el("div", { class: "pages" },
    el("button", { disabled: offset === 0, onclick: () => go("prompts", { ...given, offset: Math.max(0, offset - PAGE) || "" }) }, "Back"),
    el("span", {}, found.total ? `${number(offset + 1)} to ${number(last)} of ${number(found.total)} prompts` : "none"),
    el("button", { disabled: last >= found.total, onclick: () => go("prompts", { ...given, offset: offset + PAGE }) }, "Next"));
  return { element: el("section", {}, bar, note, el("div", { class: "scroll" }, el("table", { class: "cards" }, el("thead", {}, head), el("tbody", {}, rows))), pages) };
}

function percent(rate) {
  return `${Math.round(rate * 100)} %`;
}

function cells(rates, steps) {
  return el("div", { class: "cells" }, rates.map((rate, i) => {
    const title = rate === null ? "no sample" : percent(rate);
    const made = el("i", { title: `from step ${steps[i]}: ${title}`, role: "img", "aria-label": title });
    if (rate !== null) made.style.background = `color-mix(in srgb, ${colour("good")} ${Math.round(rate * 100)}%, ${colour("bad")})`;
    return made;
  }));
}
