// The page: tabs, the view that the address names, and the state of runs, asked for again while something grows.

import { address, get, route } from "./api.js";
import { compare } from "./compare.js";
import { curves } from "./curves.js";
import { el } from "./dom.js";
import { prompts } from "./prompts.js";
import { rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";
import { settings } from "./settings.js";
import { why } from "./why.js";

const VIEWS = { curves, rollouts, prompts, compare, settings, why, rollout };
const TABS = { curves: "Curves", rollouts: "Rollouts", prompts: "Prompts", compare: "Side by side", settings: "Settings", why: "Why" };
const POLL_MS = 3000;
const state = { runs: [], shown: 0, refresh: null, drawn: "" };

function tabs(view) {
  const links = Object.entries(TABS).map(([name, title]) =>
    el("a", { href: address(name, {}), "aria-current": name === view || (view === "rollout" && name === "rollouts") ? "page" : null }, title));
  document.getElementById("tabs").replaceChildren(...links);
}

function progress() {
  const lines = state.runs.flatMap(({ name, state: life, progress: p }) => {
    const own = state.runs.length > 1 ? `${name}: ` : "";
    if (p.error) return [`${own}${p.error}`];
    if (p.records === null) return [`${own}reading records`];
    if (p.indexed < p.records) return [`${own}${p.indexed} of ${p.records} steps read`];
    if (p.texts < p.indexed) return [`${own}texts of ${p.texts} of ${p.indexed} steps read`];
    return life === "live" ? [`${own}live`] : [];
  });
  document.getElementById("progress").textContent = lines.join(" · ");
}

// What the fields of a view offer: another run, stage or function of rewards is drawn anew.
function offered() {
  return JSON.stringify(state.runs.map((run) => [run.name, run.stages.map((stage) => [stage.name, stage.indexed?.rewards, stage.indexed?.stops])]));
}

function writing() {
  return document.activeElement?.matches("#main input, #main select") ?? false;
}

async function show() {
  const { view, given } = route();
  const name = view in VIEWS ? view : state.runs.some((run) => run.stages.some((s) => s.indexed)) ? "rollouts" : "curves";
  const turn = ++state.shown;
  tabs(name);
  const main = document.getElementById("main");
  main.setAttribute("aria-busy", "true");
  let made;
  try {
    made = await VIEWS[name](given, state.runs);
  } catch (error) {
    made = { element: el("p", { class: "error" }, error.message) };
  }
  if (turn !== state.shown) return; // another view was asked for meanwhile
  state.refresh = made.refresh ?? null;
  state.drawn = offered();
  main.replaceChildren(made.element);
  made.shown?.();
  main.setAttribute("aria-busy", "false");
}

async function poll() {
  const before = JSON.stringify(state.runs);
  try {
    state.runs = await get("runs");
  } catch {
    document.getElementById("progress").textContent = "the server has ended";
    setTimeout(poll, POLL_MS);
    return;
  }
  progress();
  if (offered() !== state.drawn && !writing()) await show();
  else if (JSON.stringify(state.runs) !== before || state.runs.some((run) => run.state === "live")) state.refresh?.(state.runs);
  setTimeout(poll, POLL_MS);
}

state.runs = await get("runs");
progress();
await show();
addEventListener("hashchange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
setTimeout(poll, POLL_MS);
