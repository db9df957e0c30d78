// Token microscope: the tokens of a sample, coloured and in a table, with their shares of the step's loss.

import { get } from "./api.js";
import { colour, el, number, select } from "./dom.js";

const RECORDED = { logps: "sampler log-prob", drawn: "drawn with", versions: "version" };
const REPLAYED = { logp: "trainer log-prob", old_logp: "old log-prob", ref_logp: "reference log-prob", gap: "trainer − sampler",
  entropy: "entropy", ratio: "ratio", clipped: "clipped", advantage: "advantage", weight: "weight", loss: "loss", share: "share of the loss" };
const MOST = 600;
const WAIT_MS = 1500;

export async function microscope(run, found) {
  const element = el("section", { id: "microscope" });
  const place = { run, stage: found.stage, step: found.step };
  let view = { update: 0, part: 0, by: null };

  async function load() {
    let tokens, state;
    try {
      [tokens, state] = await Promise.all([get("tokens", { run, id: found.id }), get("microscope", place)]);
    } catch (error) {
      element.replaceChildren(el("h2", {}, "Tokens"), el("p", { class: "quiet" }, error.message));
      return;
    }
    draw(tokens, state);
    if (state.state === "running") setTimeout(() => element.isConnected && load(), WAIT_MS);
  }

  function draw(tokens, state) {
    const part = tokens.parts[view.part];
    const losses = tokens.losses.find((one) => one.update === view.update && one.part === view.part) ?? null;
    const columns = columnsOf(part, losses);
    const by = view.by in columns ? view.by : losses ? "share" : "logps";
    const redraw = (more) => { view = { ...view, ...more }; draw(tokens, state); };
    const updates = [...new Set(tokens.losses.map((one) => one.update))];
    const names = { ...RECORDED, ...REPLAYED };
    const bar = el("div", { class: "bar" },
      select("Colour by", Object.keys(columns).map((name) => [name, names[name]]), by, (value) => redraw({ by: value })),
      tokens.parts.length > 1 ? select("Token sequence", tokens.parts.map((_, i) => [i, i + 1]), view.part,
        (value) => redraw({ part: Number(value) })) : null,
      updates.length > 1 ? select("Update", updates.map((i) => [i, i + 1]), view.update,
        (value) => redraw({ update: Number(value) })) : null);
    const chosen = (position) => {
      for (const one of element.querySelectorAll("[data-position]")) one.classList.toggle("chosen", one.dataset.position === String(position));
      element.querySelector(`tr[data-position="${position}"]`)?.scrollIntoView({ block: "nearest" });
    };
    element.replaceChildren(el("h2", {}, "Tokens"), replay(state, place, tokens, load), bar, strip(part, columns[by], chosen), tableOf(part, columns, names, chosen));
  }

  await load();
  return element;
}

function columnsOf(part, losses) {
  const drawn = part.logps.map((value, i) => (part.sampled[i] ? value - part.kept_logps[i] : null));
  const columns = { logps: part.logps, drawn, versions: part.versions };
  if (losses === null) return columns;
  for (const name of Object.keys(REPLAYED)) {
    const values = name === "gap" ? losses.logp.map((value, i) => value - part.logps[i]) : losses[name];
    if (values.some((value) => value !== null)) columns[name] = values;
  }
  return columns;
}

function replay(state, place, tokens, load) {
  const start = async () => { await get("microscope", place, "POST"); await load(); };
  const button = (title) => el("button", { class: "main", onclick: start }, title);
  if (state.state === "running") return el("div", { class: "sum", role: "status" }, "Replaying the step: a forward pass of its batch ...");
  if (state.state === "failed") return el("div", { class: "sum" }, el("p", { class: "error" }, state.error), button("Try again"));
  if (state.state === "absent") {
    return el("div", { class: "sum" }, el("p", {}, "The record has ids, masks and the sampler's log-probabilities. Trainer and reference log-probabilities, ratios and shares of the loss need a replay of the step from its checkpoint."),
      button("Replay the step"));
  }
  const own = tokens.losses.flatMap((one) => one.share).reduce((sum, value) => sum + value, 0);
  const note = tokens.losses.length ? `This sample adds ${number(own, 7)}. ` : "This sample is not in the loss. ";
  const logged = state.logged === null ? "The run has not logged this step." :
    `The run logged ${number(state.logged, 8)}; difference ${Math.abs(state.sum - state.logged).toExponential(1)}.`;
  return el("div", { class: "sum", id: "sum" }, note, `All tokens of step ${place.step} add up to ${number(state.sum, 8)}; replayed loss ${number(state.loss, 8)}. `, logged);
}

function strip(part, values, chosen) {
  const own = values.filter((value, i) => part.sampled[i] && Number.isFinite(value));
  const most = Math.max(...own.map(Math.abs), 1e-30);
  const signed = own.some((value) => value < 0) && own.some((value) => value > 0);
  const [up, down] = [colour("good"), colour("bad")];
  const spans = part.ids.map((id, i) => {
    const text = part.texts[i] ?? `[${id}]`;
    const made = el("span", { class: part.sampled[i] ? "own" : "other", title: `${id}: ${number(values[i], 6)}` }, text);
    if (!part.sampled[i]) return made;
    made.dataset.position = i;
    made.addEventListener("click", () => chosen(i));
    const hue = signed ? (values[i] > 0 ? up : down) : colour("accent");
    made.style.background = `color-mix(in srgb, ${hue} ${Math.round((Math.abs(values[i] ?? 0) / most) * 55)}%, transparent)`;
    return made;
  });
  return el("div", { class: "tokens", "aria-label": "Text by token" }, spans);
}

function tableOf(part, columns, names, chosen) {
  const first = Math.max(0, part.sampled.indexOf(true) - 3);
  const last = Math.min(part.ids.length, first + MOST);
  const head = el("tr", {}, ["position", "id"].map((name) => el("th", { class: "num" }, name)), el("th", {}, "text"), el("th", {}, "sampled"),
    Object.keys(columns).map((name) => el("th", { class: "num" }, names[name])));
  const rows = [];
  for (let i = first; i < last; i++) {
    rows.push(el("tr", { class: part.sampled[i] ? null : "other", "data-position": i, onclick: () => chosen(i) },
      el("td", { class: "num" }, i), el("td", { class: "num" }, part.ids[i]), el("td", {}, JSON.stringify(part.texts[i] ?? "")),
      el("td", {}, part.sampled[i] ? "yes" : "no"),
      Object.entries(columns).map(([name, values]) => el("td", { class: "num" }, part.sampled[i] ? shown(name, values[i]) : ""))));
  }
  const rest = part.ids.length - last;
  return el("div", {}, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))),
    el("p", { class: "quiet" }, `Positions ${first} to ${last - 1} of ${part.ids.length}${rest ? `; ${rest} more are in the text above` : ""}.`));
}

function shown(name, value) {
  if (name === "clipped") return value > 0 ? "upper" : value < 0 ? "lower" : "no";
  return number(value, 6);
}
