// An answer above the hits, written by the language model of the settings, if the reader asks for one.
// The question and the first passages are then sent to its server, which the page names.

import { readAnswerServer, sendAnswer } from "./api.js";
import { asArray, asObject, asText, button, byId, element } from "./dom.js";
import { focusHitOf } from "./results.js";
import { onLanguageChanged, t } from "./language.js";
import { problemOf, problemParts } from "./problems.js";

const box = byId("answer");
const note = byId("answer-note");
const askButton = byId("ask-answer");
const text = byId("answer-text");
const statusLine = byId("answer-status");

let server = ""; // that writes answers; "" if there is none
let body = null; // the search that is on screen
let current = null; // the controller of the answer that is being read

export async function findAnswerServer() {
  try {
    server = asText((await readAnswerServer()).server);
  } catch {
    server = "";
  }
  name();
  box.hidden = server === "" || body === null;
}

function name() {
  note.textContent = server ? t("answer.note", { server }) : "";
}

// Offers an answer to a search, which replaces the last one.
export function offerAnswer(search) {
  withdrawAnswer();
  body = search;
  box.hidden = server === "";
}

export function withdrawAnswer() {
  current?.abort();
  current = null;
  body = null;
  box.hidden = true;
  askButton.hidden = false;
  text.replaceChildren();
  statusLine.textContent = "";
}

function show(event, data, passages) {
  if (event === "passages") passages.push(...asArray(data.passages).map(asObject));
  else if (event === "sentence") {
    const sentence = element("span", "", asText(data.text));
    const cited = asArray(data.citations).filter((number) => passages[number - 1]);
    for (const number of cited) {
      const { id, title } = passages[number - 1];
      const link = button("citation", `[${number}]`, () => focusHitOf(id));
      link.setAttribute("aria-label", t("answer.citation", { number, title: asText(title) }));
      sentence.append("\u00a0", link); // on the line where the sentence ends
    }
    text.append(sentence, " ");
  } else if (event === "refusal") statusLine.textContent = t(`answer.${asText(data.reason)}`);
  else if (event === "error") statusLine.textContent = t("answer.failed");
  else if (event === "end") {
    if (statusLine.textContent === t("answer.writing")) {
      statusLine.textContent = t("answer.done", { count: data.left_out });
    }
  }
}

async function ask() {
  const controller = new AbortController();
  current = controller;
  askButton.hidden = true;
  statusLine.textContent = t("answer.writing");
  const passages = [];
  try {
    const response = await sendAnswer(body, controller.signal);
    const decoder = new TextDecoder();
    let rest = "";
    for await (const piece of chunks(response.body.getReader())) {
      const events = (rest + decoder.decode(piece, { stream: true })).split("\n\n");
      rest = events.pop();
      if (current !== controller) return;
      for (const event of events) show(...parsed(event), passages);
    }
  } catch (error) {
    if (current !== controller) return;
    statusLine.textContent = "";
    const alert = element("div", "alert");
    alert.append(...problemParts(problemOf(error), "h3", ask));
    text.replaceChildren(alert);
  }
}

async function* chunks(reader) {
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

function parsed(event) {
  const fields = event.split("\n").map((line) => line.split(/: (.*)/s));
  const { event: name, data } = Object.fromEntries(fields);
  return [name, asObject(JSON.parse(data))];
}

askButton.addEventListener("click", () => {
  text.replaceChildren();
  ask();
});

onLanguageChanged(name);
