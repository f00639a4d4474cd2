/** The choice of the next token, as sampling/strategy.py makes it: the same seed draws the same token as the server. */

import {softmax} from './forward.js';

/** SplitMix64: neighbouring numbers become 64 unrelated bits each. */
function scramble(x = 0n) {
  x = BigInt.asUintN(64, x * -0x61C8864680B583EBn + 0x1234567n);
  x = BigInt.asUintN(64, (x ^ (x >> 30n)) * -0x40A7B892E31B1A47n);
  x = BigInt.asUintN(64, (x ^ (x >> 27n)) * -0x6B2FB644ECCEEE15n);
  return x ^ (x >> 31n);
}

/** The largest logit after Gumbel noise, which is a function of seed, step and token. @param {Float32Array} logits */
export function draw(logits, seed = 0, step = 0) {
  const key = scramble(scramble(BigInt.asUintN(64, BigInt(seed))) + BigInt(step));
  let best = -Infinity, chosen = 0;
  logits.forEach((logit, token) => {
    if (logit === -Infinity) return;
    const uniform = (Number(scramble(key + BigInt(token)) >> 11n) + 0.5) * 2 ** -53;
    const noisy = logit - Math.log(-Math.log(uniform));
    if (noisy > best) [best, chosen] = [noisy, token];
  });
  return chosen;
}

/** The ids from the likeliest on. @param {Numbers} values */
export const ranked = (values) => Array.from(values, (_, id) => id).sort((a, b) => values[b] - values[a] || a - b);

/** Temperature, then top-k, top-p and min-p; with the filter that removed each token.
 * @param {Float32Array} logits @param {{[name: string]: number}} options @returns {{final: Float32Array, removed: Map<number, string>}} */
export function filtered(logits, {temperature = 1, top_k = 0, top_p = 1, min_p = 0}) {
  /** @type {Map<number, string>} */
  const removed = new Map();
  if (temperature === 0) {
    const final = new Float32Array(logits.length).fill(-Infinity);
    final[ranked(logits)[0]] = 0;
    return {final, removed};
  }
  const final = logits.map((value) => value / temperature);
  /** @param {string} by @param {(chances: Float32Array, order: number[]) => (id: number) => boolean} rule */
  const keep = (by, rule) => {
    const kept = rule(/** @type {Float32Array} */ (softmax(final.slice())), ranked(final));
    final.forEach((value, id) => {
      if (value === -Infinity || kept(id)) return;
      final[id] = -Infinity;
      removed.set(id, by);
    });
  };
  if (top_k) keep('top_k', (_, order) => {
    const least = final[order[Math.min(top_k, order.length) - 1]];
    return (id) => final[id] >= least;
  });
  if (top_p < 1) keep('top_p', (chances, order) => {
    const kept = new Set();
    let sum = 0;
    for (const id of order) {
      if (kept.size && sum >= top_p) break;
      kept.add(id);
      sum += chances[id];
    }
    return (id) => kept.has(id);
  });
  if (min_p) keep('min_p', (chances, order) => (id) => chances[id] >= min_p * chances[order[0]]);
  return {final, removed};
}

/** Positive logits of tokens already there are divided by the penalty, negative ones multiplied. @param {Float32Array} logits @param {number[]} history */
export function penalised(logits, history, penalty = 1) {
  const out = logits.slice();
  if (penalty !== 1) for (const id of new Set(history)) out[id] = out[id] < 0 ? out[id] * penalty : out[id] / penalty;
  return out;
}
