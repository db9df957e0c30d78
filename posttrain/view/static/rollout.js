// One rollout: its numbers, its group, its text, and its tokens.

import { address, get } from "./api.js";
import { el, number, sign } from "./dom.js";
import { microscope } from "./microscope.js";

const TITLES = { prompt: "prompt", sampled: "sampled by the policy", given: "given by the environment" };

export async function rollout(given, runs) {
  const run = runs[Number(given.run ?? 0)];
  const found = await get("rollout", { run: run.run, id: given.id });
  const facts = {
    step: found.step, "dataset row": found.row, reward: found.reward,
    ...Object.fromEntries(Object.entries(found.rewards).map(([name, value]) => [`rewards/${name}`, value])),
    advantage: found.advantage, role: found.role, "staleness (versions)": found.staleness, "prompt tokens": found.prompt_tokens,
    "sampled tokens": found.sampled_tokens, "token sequences": found.parts > 1 ? found.parts : null, stop: found.stop,
  };
  const list = el("dl", { class: "facts" }, Object.entries(facts).filter(([, value]) => value !== null).map(([name, value]) =>
    el("div", {}, el("dt", {}, breakable(name)), el("dd", { class: name === "advantage" ? sign(value) : null },
      typeof value === "number" ? number(value, 6) : value))));
  const group = found.group.length < 2 ? null : el("nav", { class: "chips", "aria-label": "Samples of the group" },
    found.group.map((one) => el("a", { href: address("rollout", { run: run.run, id: one.id }),
      "aria-current": one.id === found.id ? "true" : null }, `${one.sample}: ${number(one.reward, 3)}`)));
  const pieces = found.pieces === null ? [el("p", { class: "quiet" }, "The text is not read yet.")]
    : found.pieces.map(([kind, text]) => el("div", { class: `piece ${kind}` }, el("h3", {}, TITLES[kind]), el("pre", {}, text)));
  const pictures = found.pictures.length === 0 ? null : el("div", { class: "pictures", "aria-label": "Pictures of the prompt" },
    found.pictures.map((source, index) => el("img", { src: source, alt: `picture ${index + 1}` })));
  const links = el("p", {},
    el("a", { href: address("rollouts", { run: run.run, stage: found.stage, step_min: found.step, step_max: found.step }) },
      `All rollouts of step ${found.step}`), found.row === null ? "" : " · ",
    found.row === null ? "" : el("a", { href: address("rollouts", { run: run.run, stage: found.stage, row: found.row, sort: "step" }) },
      `All of dataset row ${found.row}`));
  const tokens = found.source !== "record"
    ? el("p", { class: "quiet" }, "This is from the table of samples: the run has no record of its tokens.")
    : await microscope(run.run, found);
  return { element: el("section", {}, el("h2", {}, `${run.name}, ${found.stage}, step ${found.step}, group ${found.grp ?? "–"}, sample ${found.sample}`),
    links, list, group, pictures, pieces, tokens) };
}

// A name that breaks between its words, where it is too long for a line.
function breakable(name) {
  return name.split(/(?<=[_/])/).flatMap((part) => [part, el("wbr")]);
}
