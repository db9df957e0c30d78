// The chat page: messages with pictures and calls of tools, drawn as they come.

import { get } from "./api.js";
import { el } from "./dom.js";

const BUSY_MS = 150, IDLE_MS = 1500;
const by = (id) => document.getElementById(id);
const pictures = new Map(), drawn = [];
let attached = [], timer = null;

function pictureOf(number) {
  if (!pictures.has(number)) pictures.set(number, get("picture", { number }).then((found) => found.url));
  const image = el("img", { alt: `picture ${number + 1}` });
  pictures.get(number).then((url) => { image.src = url; }, (error) => { image.alt = error.message; });
  return image;
}

function written(value) {
  return typeof value === "string" ? JSON.stringify(value) : Array.isArray(value) ? `[${value.map(written).join(", ")}]`
    : value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

function callOf(call) {
  const given = Object.entries(call.arguments).map(([name, value]) => `${name}=${written(value)}`).join(", ");
  return el("code", { class: "call" }, `${call.name}(${given})`);
}

function messageOf(message) {
  return el("article", { class: `message ${message.role}` }, el("h3", {}, message.role),
    message.pictures.length ? el("div", { class: "pictures" }, message.pictures.map(pictureOf)) : null,
    message.text ? el("pre", {}, message.text) : null, message.calls.map(callOf));
}

// Only what has changed is drawn anew, so that a selection in other messages stays.
function draw(state) {
  const shown = state.messages.map((message) => ({ key: JSON.stringify(message), make: () => messageOf(message) }));
  const last = state.messages[state.messages.length - 1];
  if (state.busy) {
    const calls = last?.role === "assistant" && last.calls.length > 0;
    const text = state.said || (calls ? "calling" : "thinking");
    shown.push({ key: `said ${text}`, make: () => el("article", { class: "message assistant now" }, el("h3", {}, "assistant"),
      el(state.said ? "pre" : "p", { class: state.said ? null : "quiet" }, state.said || `${text} ...`)) });
  }
  const main = by("main"), atEnd = innerHeight + scrollY >= document.body.scrollHeight - 40;
  shown.forEach(({ key, make }, index) => {
    if (drawn[index] === key) return;
    const made = make();
    if (index < main.children.length) main.children[index].replaceWith(made); else main.append(made);
    drawn[index] = key;
  });
  while (main.children.length > shown.length) { main.lastChild.remove(); drawn.pop(); }
  main.setAttribute("aria-busy", String(state.busy));
  by("title").textContent = state.title;
  by("error").textContent = state.error ?? "";
  by("file").hidden = !state.sees;
  by("stop").disabled = !state.busy;
  for (const id of ["send", "reset"]) by(id).disabled = state.busy;
  by("again").disabled = state.busy || !state.messages.some((message) => message.role === "user");
  if (atEnd) scrollTo(0, document.body.scrollHeight);
}

async function update() {
  clearTimeout(timer);
  let wait = IDLE_MS;
  try {
    const state = await get("state");
    draw(state);
    if (state.busy) wait = BUSY_MS;
  } catch (error) {
    by("error").textContent = `the chat does not answer: ${error.message}`;
  }
  timer = setTimeout(update, wait);
}

async function change(name, body) {
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch(`api/${name}`, { method: "POST", headers, body: body && JSON.stringify(body) });
    if (!response.ok) throw new Error((await response.json()).error);
  } catch (error) {
    await update();
    by("error").textContent = error.message;
    return false;
  }
  await update();
  return true;
}

function readAsUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  const found = await Promise.all([...files].filter((file) => file.type.startsWith("image/")).map(readAsUrl));
  attached = [...attached, ...found];
  drawAttached();
}

function drawAttached() {
  by("attached").replaceChildren(...attached.map((url, index) => el("button", { type: "button",
    title: "Remove", "aria-label": `Remove picture ${index + 1}`,
    onclick: () => { attached.splice(index, 1); drawAttached(); } }, el("img", { src: url, alt: `picture ${index + 1}` }))));
}

async function send(event) {
  event.preventDefault();
  const text = by("text").value;
  if (by("send").disabled || (!text.trim() && attached.length === 0)) return;
  if (!await change("ask", { text, images: attached })) return;
  by("text").value = "";
  by("pictures").value = "";
  attached = [];
  drawAttached();
}

by("form").addEventListener("submit", send);
by("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
by("pictures").addEventListener("change", (event) => attach(event.target.files));
document.addEventListener("paste", (event) => attach(event.clipboardData.files));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); attach(event.dataTransfer.files); });
by("stop").addEventListener("click", () => change("stop"));
by("again").addEventListener("click", () => change("again"));
by("reset").addEventListener("click", () => change("reset"));
update();
