// Settings of a run, those that differ from their defaults first of all, and its warnings.

import { get, go } from "./api.js";
import { el, select } from "./dom.js";

export async function settings(given, runs) {
  const run = runs[Number(given.run ?? 0)] ?? runs[0];
  const found = await get("settings", { run: run.run });
  const all = given.all === "yes";
  const change = (more) => go("settings", { ...given, ...more });
  const bar = el("div", { class: "bar" },
    runs.length > 1 ? select("Run", runs.map((one) => [String(one.run), one.name]), String(run.run), (value) => change({ run: value })) : null,
    select("Settings", [["", "other than the defaults"], ["yes", "all"]], all ? "yes" : "", (value) => change({ all: value })));
  // A setting without a default had to be given, or is one of a run of another version.
  const rows = found.settings.filter((one) => all || one.differs || one.default === null).map((one) =>
    el("tr", { class: one.differs ? "differs" : null }, el("td", { "data-name": "setting" }, one.name), el("td", { class: "text", "data-name": "value" }, one.value),
      el("td", { class: "text quiet", "data-name": "default" }, one.default ?? "")));
  const head = el("tr", {}, ["setting", "value", "default"].map((name) => el("th", {}, name)));
  const told = found.warnings.map((one) => el("li", {}, [one.stage, `step ${one.step}`, one.name].join(", "), " ", el("span", { class: "text" }, one.text)));
  return {
    element: el("section", {}, bar, el("h2", {}, "Warnings"),
      told.length ? el("ul", { class: "warnings" }, told) : el("p", { class: "quiet" }, "none is recorded"),
      el("h2", {}, "Settings"), el("div", { class: "scroll" }, el("table", { class: "cards" }, el("thead", {}, head), el("tbody", {}, rows)))),
  };
}
