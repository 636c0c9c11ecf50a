// What a hit has in common with the question: its words; and the sentence that answers it.

import { asObject, element, isNumber } from "./dom.js";

// Words of questions that say nothing of what is asked.
const EMPTY =
  /什么|怎么办|怎么|怎样|如何|哪些|哪个|哪种|应该|可以|需要|注意|是否|为什么|原因|办法|有没有|请问|一下|经常|总是|多少|多久|能不能|会不会|要不要|患者|病人|[吗呢的了是上要有我在和与及被把或]/;
const HAN = /\p{Script=Han}/u;
const RUNS = /\p{Script=Han}+|[\p{L}\p{N}]+(?:[.\-/+][\p{L}\p{N}]+)*/gu;

const fold = (text) => text.normalize("NFKC").toLowerCase();

// Yields the terms of a text with their places: pairs of Chinese characters, and other words.
function* termsOf(text) {
  for (const run of text.matchAll(RUNS)) {
    const letters = run[0];
    if (!HAN.test(letters)) {
      yield [fold(letters), run.index, run.index + letters.length];
      continue;
    }
    let at = run.index;
    const units = [...letters];
    for (let i = 0; i + 1 < units.length; i += 1) {
      const pair = units[i] + units[i + 1];
      yield [pair, at, at + pair.length];
      at += units[i].length;
    }
  }
}

// Returns the terms of a question.
export function termsOfQuestion(question) {
  const found = new Set();
  for (const part of question.split(EMPTY)) {
    for (const [term] of termsOf(part)) found.add(term);
  }
  return found;
}

// Returns the text as nodes in which the terms are marked.
export function marked(text, terms) {
  const nodes = [];
  let done = 0;
  let start = -1;
  let end = -1;
  const close = () => {
    if (start < 0) return;
    nodes.push(text.slice(done, start), element("mark", "", text.slice(start, end)));
    done = end;
  };
  for (const [term, from, to] of termsOf(text)) {
    if (!terms.has(term)) continue;
    if (from > end) {
      close();
      start = from;
    }
    end = to;
  }
  close();
  nodes.push(text.slice(done));
  return nodes.filter((node) => node !== "");
}

// Returns where the sentence of the hit's evidence starts and ends in its text [UTF-16 units]; null
// unless it is certain, and not the whole text.
export function certainEvidence(text, evidence) {
  const { start, end, certain } = asObject(evidence);
  if (certain !== true || !isNumber(start) || !isNumber(end)) return null;
  const letters = [...text]; // offsets of the service count code points
  const from = letters.slice(0, start).join("").length;
  const to = from + letters.slice(start, end).join("").length;
  return to - from < text.trim().length ? [from, to] : null;
}
