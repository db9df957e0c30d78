// Why a run did not learn: causes with their numbers, and what the run told of them while it trained.

import { get, go } from "./api.js";
import { el, select } from "./dom.js";

export async function why(given, runs) {
  const run = runs.find((one) => String(one.run) === given.run) ?? runs[0];
  const bar = el("div", { class: "bar" }, select("Run", runs.map((one) => [one.run, one.name]), run.run, (value) => go("why", { run: value })));
  const found = await get("why", { run: run.run });
  const stages = found.stages.flatMap((stage) => [
    el("h2", {}, stage.head),
    stage.causes.length ? el("ol", {}, stage.causes.map(cause)) : el("p", { class: "quiet" }, "nothing stands out"),
  ]);
  const told = found.told.map((line) => el("li", {}, `${line.stage}, step ${line.step}: ${line.summary}`));
  const warnings = told.length ? [el("h2", {}, "Told while it trained"), el("ul", {}, told)] : [];
  return { element: el("section", {}, bar, stages, warnings) };
}

function cause(one) {
  const numbers = one.evidence.map((line) => el("div", { class: "quiet" }, line));
  return el("li", {}, el("strong", {}, one.summary), one.sure ? null : " (likely)", numbers, el("div", {}, `try: ${one.advice}`));
}
