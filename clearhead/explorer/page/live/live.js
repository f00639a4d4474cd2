/** A page that computes by itself: its model unpacked, what Python computed computed again, and then the page's requests answered. */

import {makeModel} from './forward.js';
import {makeTokenizer} from './tokenizer.js';
import {makeAnswers} from './answers.js';

/** Weights as they are, or 8 bits and a scale a row. @param {LiveModel} told */
function unpack({tensors, weights}) {
  const text = atob(weights), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return Object.fromEntries(tensors.map(({name, shape, at, dtype}) => {
    const size = shape.reduce((a, b) => a * b, 1);
    if (dtype === 'f4') return [name, {shape, data: new Float32Array(bytes.buffer, at, size)}];
    const [many] = shape, wide = size / many, scales = new Float32Array(bytes.buffer, at, many), whole = new Int8Array(bytes.buffer, at + 4 * many, size);
    return [name, {shape, data: Float32Array.from(whole, (value, i) => value * scales[Math.floor(i / wide)])}];
  }));
}

/** What differs from what Python computed, in words; null if nothing does. @param {LiveModel} told @param {Words} tokenizer @param {ReturnType<typeof makeAnswers>} made */
function difference({texts, check}, tokenizer, {pass, scores}) {
  for (const [text, ids] of texts) {
    const mine = tokenizer.encode(text);
    if (String(mine) !== String(ids)) return `of the text ${JSON.stringify(text.slice(0, 40))} the tokenizer here makes ${mine.slice(0, 12)}, Python's ${ids.slice(0, 12)}`;
  }
  const one = pass({model: '', text: check.text, target: null, second: null, changes: []});
  if (String(one.target) !== String(check.target)) return `the model writes ${one.target} here, in Python ${check.target}`;
  const logits = check.logits.length === one.states.d ? one.states.data.subarray(-one.states.d) : scores(one.states, one.states.n - 1);
  const size = Math.max(...check.logits.map(Math.abs)), off = Math.max(...check.logits.map((value, i) => Math.abs(value - logits[i])));
  return off <= 1e-3 * Math.max(1, size) ? null : `a logit differs by ${off.toPrecision(2)}`;
}

const told = window.CLEARHEAD_MODEL;
if (told) {
  const tokenizer = makeTokenizer(told.tokenizer), model = makeModel(told.config, unpack(told));
  const made = makeAnswers(model, tokenizer, told);
  const wrong = difference(told, tokenizer, made);
  window.CLEARHEAD_LOCAL = {
    names: Object.keys(made.answers), precision: told.precision,
    answer(name, params) {
      if (wrong) throw new Error(`This browser does not compute what Python did: ${wrong}. Nothing is shown; run clearhead explore.`);
      const answer = made.answers[name](params);
      return /** @type {Answer} */ ({arrays: {}, shapes: {}, ...answer});
    },
  };
}
