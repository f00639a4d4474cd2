/** The forward pass of a Transformer: tokens in, final states and logits out. The equations are those of models/ and layers/.
 *
 * `Rows` are n rows of d numbers, one row a token. T queries, S keys, H heads, K key heads, E numbers a head. */

/** @param {Float32Array} [data] @returns {Rows} */
export const rows = (n = 0, d = 0, data = new Float32Array(n * d)) => ({n, d, data});
/** @param {Rows} x */
export const rowOf = ({d, data}, t = 0) => data.subarray(t * d, (t + 1) * d);

/** x Wᵀ + b. Four rows at a time, so that each weight is read once for four tokens; sums in 64 bits.
 * @param {Rows} x @param {Tensor} weight @param {Tensor} [bias] */
export function linear({n, d, data: x}, {shape: [out], data: w}, bias) {
  const y = rows(n, out);
  for (let t = 0; t < n; t += 4) {
    const many = Math.min(4, n - t), [a, b, c, e] = [0, 1, 2, 3].map((more) => (t + Math.min(more, many - 1)) * d);
    for (let o = 0; o < out; o++) {
      const at = o * d, start = bias ? bias.data[o] : 0;
      let s0 = start, s1 = start, s2 = start, s3 = start;
      if (many === 1) {
        for (let i = 0; i < d; i++) s0 += x[a + i] * w[at + i];
      } else {
        for (let i = 0; i < d; i++) {
          const weight = w[at + i];
          s0 += x[a + i] * weight;
          s1 += x[b + i] * weight;
          s2 += x[c + i] * weight;
          s3 += x[e + i] * weight;
        }
      }
      y.data[t * out + o] = s0;
      if (many > 1) y.data[(t + 1) * out + o] = s1;
      if (many > 2) y.data[(t + 2) * out + o] = s2;
      if (many > 3) y.data[(t + 3) * out + o] = s3;
    }
  }
  return y;
}

/** @param {Rows} x @param {Rows} y @returns {Rows} */
export const add = (x, y) => ({...x, data: x.data.map((value, i) => value + y.data[i])});

/** (x - mean) / std · w + b, or x / rms · w; of each row, or of each head's part of it.
 * @param {Rows} x @param {string} kind @param {number} eps @param {Tensor} weight @param {Tensor} [bias] @returns {Rows} */
function normed({n, d, data}, kind, eps, weight, bias) {
  const out = rows(n, d), width = weight.shape[0];
  for (let from = 0; from < data.length; from += width) {
    let mean = 0, square = 0;
    if (kind === 'layer') for (let i = 0; i < width; i++) mean += data[from + i] / width;
    for (let i = 0; i < width; i++) square += (data[from + i] - mean) ** 2 / width;
    const by = 1 / Math.sqrt(square + eps);
    for (let i = 0; i < width; i++) out.data[from + i] = (data[from + i] - mean) * by * weight.data[i] + (bias ? bias.data[i] : 0);
  }
  return out;
}

/** 2/√π exp(-x²) Σ x (2x²)^k / (2k+1)!!: all terms have one sign, so nothing cancels. */
function erf(x = 0) {
  if (Math.abs(x) > 5) return Math.sign(x);
  let term = x, sum = x;
  for (let k = 1; k < 200 && Math.abs(term) > 1e-17 * Math.abs(sum); k++) sum += (term *= (2 * x * x) / (2 * k + 1));
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

/** @type {{[name: string]: (x: number) => number}} */
const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  relu2: (x) => Math.max(0, x) ** 2,
  silu: (x) => x / (1 + Math.exp(-x)),
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
};

/** In place, each row: exp(x - max) / sum. @param {Float32Array | Float64Array} x */
export function softmax(x) {
  let most = -Infinity, sum = 0;
  for (const value of x) most = Math.max(most, value);
  for (let i = 0; i < x.length; i++) sum += x[i] = Math.exp(x[i] - most);
  for (let i = 0; i < x.length; i++) x[i] /= sum;
  return x;
}

/** A model from its config and its tensors, which have the names of a checkpoint.
 * @param {{[field: string]: any}} config @param {{[name: string]: Tensor}} tensors */
export function makeModel(config, tensors) {
  const {d_head: E, norm_first: normFirst} = config;
  const scale = config.attention_scale || 1 / Math.sqrt(E);
  const isPair = config.shape === 'encoder-decoder';
  const decoder = isPair ? 'decoder.' : '';
  /** @param {Rows} x */
  const part = (x, name = '') => linear(x, tensors[`${name}.weight`], tensors[`${name}.bias`]);
  /** @param {Rows} x */
  const norm = (x, name = '', kind = config.norm) => (kind === 'none' || !tensors[`${name}.weight`] ? x
    : normed(x, kind, config.norm_eps, tensors[`${name}.weight`], tensors[`${name}.bias`]));

  /** A stack's positions as they enter the embeddings. @param {Rows} x */
  function place(x, stack = '', start = 0) {
    const learned = tensors[`${stack}positions.weight`];
    if (config.positions !== 'sinusoidal' && !(config.positions === 'learned' && learned)) return x;
    const out = rows(x.n, x.d);
    for (let t = 0; t < x.n; t++) {
      const table = learned ? rowOf(rows(learned.shape[0], x.d, learned.data), start + t) : sinusoids(start + t, x.d, config.sinusoid_halves);
      for (let i = 0; i < x.d; i++) out.data[t * x.d + i] = x.data[t * x.d + i] + table[i];
    }
    return out;
  }

  /** Token embeddings: a row of the table, times √d where the config says so. @param {number[]} ids */
  function embed(ids, name = 'tokens', segments = true) {
    const {shape: [, d], data} = tensors[`${name}.weight`];
    const x = rows(ids.length, d), factor = config.embedding_scale ? Math.sqrt(d) : 1;
    const segment = segments && tensors['segments.weight']?.data;  // all tokens are of the first
    ids.forEach((id, t) => {
      for (let i = 0; i < d; i++) x.data[t * d + i] = data[id * d + i] * factor + (segment ? segment[i] : 0);
    });
    return x;
  }

  /** Rotary positions: pair i of a head is turned by position · frequency i. @param {Rows} x */
  function turn(x, start = 0) {
    if (config.positions !== 'rotary') return x;
    const frequencies = tensors.frequencies.data, out = rows(x.n, x.d), half = E / 2;
    for (let t = 0; t < x.n; t++) {
      for (let i = 0; i < half; i++) {
        const angle = Math.fround((start + t) * frequencies[i]), cos = Math.cos(angle), sin = Math.sin(angle);
        const [one, other] = config.rotary_interleaved ? [2 * i, 2 * i + 1] : [i, i + half];
        for (let at = t * x.d; at < (t + 1) * x.d; at += E) {
          out.data[at + one] = x.data[at + one] * cos - x.data[at + other] * sin;
          out.data[at + other] = x.data[at + other] * cos + x.data[at + one] * sin;
        }
      }
    }
    return out;
  }

  /** softmax(q kᵀ · scale + bias) of one query and head over the keys it may see, which begin at `first`. Queries are the last of the keys.
   * @param {Rows} q @param {Rows} k */
  function weightsOf(q, k, site = '', h = 0, t = 0) {
    const stack = site.slice(0, site.indexOf('blocks.')), isCross = site.endsWith('.cross');
    const causal = !isCross && (stack === 'decoder.' || config.shape === 'decoder');
    const window = isCross ? 0 : config.window, bias = isCross ? undefined : tensors[`${stack}bias`];
    const here = k.n - q.n + t, from = t * q.d + h * E, kv = headOf(q, k, h) * E;
    const first = window ? Math.max(0, here - window + 1) : 0;
    const weights = new Float64Array((causal ? here + 1 : window ? Math.min(k.n, here + window) : k.n) - first);
    for (let i = 0; i < weights.length; i++) {
      const s = first + i;
      for (let e = 0; e < E; e++) weights[i] += q.data[from + e] * k.data[s * k.d + kv + e];
      weights[i] = weights[i] * scale + (bias ? biasAt(bias, h, s - here) : 0);
    }
    return {first, weights: softmax(weights)};
  }
  /** Neighbouring heads share a key head. @param {Rows} q @param {Rows} k */
  const headOf = (q, k, h = 0) => Math.floor((h * k.d) / q.d);

  /** softmax(q kᵀ / √E) v, head by head. @param {Rows} q @param {Rows} k @param {Rows} v */
  function attend(q, k, v, site = '') {
    const out = rows(q.n, q.d);
    for (let h = 0; h < q.d / E; h++) {
      const kv = headOf(q, k, h) * E;
      for (let t = 0; t < q.n; t++) {
        const {first, weights} = weightsOf(q, k, site, h, t), at = t * q.d + h * E;
        for (let i = 0; i < weights.length; i++) {
          for (let e = 0; e < E; e++) out.data[at + e] += weights[i] * v.data[(first + i) * v.d + kv + e];
        }
      }
    }
    return out;
  }

  /** concat(heads) W_o. Keys and values are of the tokens themselves, or of `memory`; a cache keeps them.
   * @param {Rows} x @param {string} site @param {{memory?: Rows, start: number, cache: KeyCache, look: Look}} how */
  function attention(x, site, {memory, start, cache, look}) {
    const qk = (/** @type {Rows} */ y, name = '') => norm(y, `${site}.${name}_norm`, 'rms');
    let q = qk(part(x, `${site}.q_proj`), 'q');
    if (!memory) q = turn(q, start);
    if (!memory || !cache[site]) {
      const k = qk(part(memory ?? x, `${site}.k_proj`), 'k'), v = part(memory ?? x, `${site}.v_proj`);
      cache[site] = memory ? {k, v} : {k: after(cache[site]?.k, turn(k, start)), v: after(cache[site]?.v, v)};
    }
    const {k, v} = cache[site];
    let out = attend(q, k, v, site);
    if (look.change) out = look.change(site, out, start);
    for (const [name, value] of Object.entries({q, k, v, out})) look.see?.(`${site}.${name}`, value);
    return part(out, `${site}.o_proj`);
  }

  /** down(f(up(x))), or gated, down(f(gate(x)) · up(x)). @param {Rows} x @param {string} at @param {{start: number, look: Look}} how */
  function feedforward(x, at, {start, look}) {
    const f = ACTIVATIONS[config.feedforward];
    let hidden = part(x, `${at}.up`);
    if (config.gated) {
      const gate = part(x, `${at}.gate`);
      hidden.data.forEach((value, i) => (hidden.data[i] = f(gate.data[i]) * value));
    } else hidden.data.forEach((value, i) => (hidden.data[i] = f(value)));
    if (look.change) hidden = look.change(at, hidden, start);
    look.see?.(`${at}.hidden`, hidden);
    return part(hidden, `${at}.down`);
  }

  /** Pre-norm: x + sublayer(norm(x)). Post-norm, as in the paper: norm(x + sublayer(x)).
   * @param {Rows} x @param {(y: Rows) => Rows} sublayer */
  const step = (x, name = '', sublayer) => (normFirst ? add(x, sublayer(norm(x, name))) : norm(add(x, sublayer(x)), name));

  /** From embeddings to final states. @param {Rows} x @param {Look} [look] @param {KeyCache} [cache] @param {Rows} [memory] */
  function run(x, stack = '', look = {}, cache = {}, memory) {
    const start = cache[`${stack}blocks.0.attention`]?.k.n ?? 0;
    x = place(x, stack, start);
    if (config.embedding_norm) x = norm(x, `${stack}embedding_norm`);
    look.see?.(`${stack}embedding`, x);
    const depth = memory ? config.n_decoder_layers : config.n_layers;
    for (let layer = 0; layer < depth; layer++) {
      const at = `${stack}blocks.${layer}`, how = {start, cache, look};
      x = step(x, `${at}.attention_norm`, (y) => attention(y, `${at}.attention`, how));
      if (memory) x = step(x, `${at}.cross_norm`, (y) => attention(y, `${at}.cross`, {...how, memory}));
      x = step(x, `${at}.feedforward_norm`, (y) => feedforward(y, `${at}.feedforward`, how));
      look.see?.(`${at}.residual`, x);
    }
    return normFirst ? norm(x, `${stack}norm`) : x;
  }

  return {
    config, tensors, isPair, part, norm, embed, place,
    /** @param {number[]} ids @param {Look} [look] */
    encode: (ids, look) => run(embed(ids, tensors['source.weight'] ? 'source' : 'tokens'), 'encoder.', look),
    /** The final states of the last stack, for tokens after those that `cache` holds.
     * @param {number[]} ids @param {Look} [look] @param {KeyCache} [cache] @param {Rows} [memory] */
    states: (ids, look, cache, memory) => run(embed(ids), decoder, look, cache, memory),
    /** The last norm of a stack, which the lens applies after every layer. @param {Rows} x */
    finish: (x, stack = decoder) => (normFirst ? norm(x, `${stack}norm`) : x),
    /** A score for each token of the vocabulary. @param {Rows} x */
    project(x) {
      if (config.head_transform) {
        const y = part(x, 'head.dense');
        x = norm({...y, data: y.data.map(ACTIVATIONS[config.feedforward])}, 'head.norm');
      }
      if (config.head_scale) x = {...x, data: x.data.map((value) => value / Math.sqrt(config.d_model))};
      return linear(x, tensors['head.weight'] ?? tensors['tokens.weight'], tensors['head.bias']);
    },
    /** One vector for the whole text: the first state, or the mean or the maximum of all. @param {Rows} states */
    pooled(states) {
      const {n, d, data} = states, one = rows(1, d, states.data.slice(0, d));
      if (config.pool !== 'first') {
        for (let i = 0; i < d; i++) {
          const column = Array.from({length: n}, (_, t) => data[t * d + i]);
          one.data[i] = config.pool === 'max' ? Math.max(...column) : column.reduce((a, b) => a + b) / n;
        }
      }
      const made = config.pooler ? part(one, 'pool.dense') : one;
      if (config.pooler) made.data.forEach((value, i) => (made.data[i] = Math.tanh(value)));
      const length = config.pool_normed ? Math.hypot(...made.data) : 1;
      return {...made, data: made.data.map((value) => value / length)};
    },
    /** A score for each class. @param {Rows} states */
    classify(states) {
      return part(this.pooled(states), 'head');
    },
    /** What positions add to a score. */
    biasAt: (stack = '', head = 0, distance = 0) => (tensors[`${stack}bias`] ? biasAt(tensors[`${stack}bias`], head, distance) : 0),
    scale, weightsOf, headOf,
  };
}

/** sin and cos of position / 10000^(2i/d), alternating or in two halves. */
function sinusoids(at = 0, d = 0, halves = false) {
  const table = new Float32Array(d);
  for (let i = 0; i < d / 2; i++) {
    const angle = at * 10_000 ** ((-2 * i) / d);
    table[halves ? i : 2 * i] = Math.sin(angle);
    table[halves ? i + d / 2 : 2 * i + 1] = Math.cos(angle);
  }
  return table;
}

/** A row for each head, a column for each distance of key and query, from the most negative on. @param {Tensor} bias */
const biasAt = ({shape: [, wide], data}, head = 0, distance = 0) => data[head * wide + (wide - 1) / 2 + distance];

/** One text after the other. @param {Rows | undefined} before @param {Rows} x */
function after(before, x) {
  if (!before) return x;
  const all = rows(before.n + x.n, x.d);
  all.data.set(before.data);
  all.data.set(x.data, before.data.length);
  return all;
}
