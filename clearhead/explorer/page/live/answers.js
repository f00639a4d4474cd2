/** The page's requests, answered here: what the files of explorer/ answer on a server, from the forward pass in forward.js. */

import {rowOf, rows, softmax} from './forward.js';
import {trace} from './trace.js';
import {draw, filtered, penalised, ranked} from './sample.js';

const KEPT = 6, TOP = 20;
/** Letters of a text: a page that cuts a million of them into tokens answers nothing else for minutes. */
const MOST_LETTERS = 10_000;

/** @param {Computing} model @param {Words} tokenizer @param {LiveModel} told */
export function makeAnswers(model, tokenizer, {generation, limit, target_limit: targetLimit}) {
  const {config, isPair} = model, E = config.d_head;
  const isEncoder = config.shape === 'encoder', hasClasses = config.head === 'classes';
  const prefix = isPair ? 'decoder.' : '', depth = isPair ? config.n_decoder_layers : config.n_layers;
  /** @type {Map<string, Pass>} */
  const passes = new Map();
  const nameOfToken = tokenizer.name;
  const nameOf = (id = 0) => (hasClasses ? config.labels[id] ?? String(id) : tokenizer.name(id));

  // Inputs.

  /** @param {number[]} ids @returns {Side} */
  const side = (ids) => ({tokens: ids.map(tokenizer.name), ids, kind: 'tokens', special: ids.map((_, at) => at).filter((at) => tokenizer.specials.has(ids[at]))});
  /** @param {number[]} ids */
  function checkLength(ids, most = limit, what = 'text') {
    if (!ids.length) throw new Error(`The ${what} has no token; write something.`);
    if (ids.length > most) throw new Error(`The ${what} has ${ids.length} tokens; this page computes by itself and takes ${most} at most. Shorten it, or run clearhead explore.`);
  }
  /** @type {Words['encode']} */
  function encode(text = '', ...how) {
    if (text.length > MOST_LETTERS) throw new Error(`The text has ${text.length.toLocaleString('en')} letters; this page computes by itself and takes ${MOST_LETTERS.toLocaleString('en')} at most. Shorten it, or run clearhead explore.`);
    return tokenizer.encode(text, ...how);
  }
  function read(text = '') {
    let ids = encode(text);
    if (isPair && tokenizer.eos !== null && ids.at(-1) !== tokenizer.eos) ids = [...ids, tokenizer.eos];
    if (!ids.length && generation.bos !== null) ids = [generation.bos];
    checkLength(ids);
    const {pad, eos, bos} = tokenizer;
    if (pad !== null && pad !== eos && pad !== bos && ids.includes(pad)) throw new Error(`The text holds the padding token ${tokenizer.name(pad)}, which this page does not compute; remove it.`);
    return ids;
  }
  const prompt = () => (isPair ? [generation.decoder_start ?? generation.bos] : []);

  // Forward passes, and changes of heads.

  /** @param {Run} run @returns {Pass} */
  function pass({text, target, second, changes}) {
    const key = JSON.stringify([text, target, second, changes]);
    const found = passes.get(key) ?? compute(text, target, changer({model: '', text, target, second, changes}));
    passes.delete(key);
    passes.set(key, found);
    if (passes.size > KEPT) passes.delete([...passes.keys()][0]);
    return found;
  }
  /** @param {string | null} target @param {Look['change']} change @returns {Pass} */
  function compute(text = '', target, change) {
    const source = read(text);
    /** @type {Map<string, Rows>} */
    const seen = new Map();
    const look = {see: (/** @type {string} */ site, /** @type {Rows} */ value) => void seen.set(site, value), change};
    if (!isPair) return {source, target: [], seen, states: model.states(source, look), change};
    const memory = model.encode(source, look);
    const ids = [...prompt(), ...(target === null ? greedy(source, memory, change) : encode(target, false, true))];
    checkLength(ids, targetLimit, 'target');
    return {source, target: ids, memory, seen, states: model.states(ids, look, {}, memory), change};
  }
  /** @param {Run} run @returns {Run} */
  const plainOf = (run) => ({...run, second: null, changes: []});

  /** What replaces the outputs of the changed heads and neurons (of a whole part where none is named), one change after the other.
   * @param {Run} run @returns {Look['change']} */
  function changer(run) {
    if (!run.changes.length) return undefined;
    const needs = (/** @type {string} */ how) => run.changes.some((change) => change.how === how);
    const plain = needs('mean') ? pass(plainOf(run)).seen : null;
    const other = needs('patch') ? pass({...plainOf(run), text: run.second ?? ''}).seen : null;
    return (site, out, start) => {
      const mine = run.changes.filter((change) => change.site === site);
      if (!mine.length) return out;
      const changed = {...out, data: out.data.slice()}, isHidden = site.endsWith('.feedforward'), wide = isHidden ? 1 : E;
      for (const {head, how, by = 1} of mine) {
        const from = (how === 'mean' ? plain : other)?.get(`${site}.${isHidden ? 'hidden' : 'out'}`);
        for (let e = (head ?? 0) * wide; e < (head === null ? out.d : (head + 1) * wide); e++) {
          let mean = 0;
          if (how === 'mean' && from) for (let s = 0; s < from.n; s++) mean += from.data[s * from.d + e] / from.n;
          for (let t = 0; t < out.n; t++) {
            const at = t * out.d + e;
            if (how === 'patch') changed.data[at] = from && start + t < from.n ? from.data[(start + t) * from.d + e] : changed.data[at];
            else changed.data[at] = how === 'zero' ? 0 : how === 'mean' ? mean : changed.data[at] * by;
          }
        }
      }
      return changed;
    };
  }

  /** The likeliest token at each step, until one that ends. @param {number[]} ids @param {Rows} memory @param {Look['change']} change */
  function greedy(ids, memory, change) {
    /** @type {number[]} */
    const written = [];
    const cache = {}, most = Math.max(1, Math.min(2 * ids.length + 20, targetLimit - 1));
    for (let next = prompt(); written.length < most;) {
      const logits = allowed(model.project(model.states(next, {change}, cache, memory)).data);
      const best = ranked(logits)[0];
      if (generation.eos.includes(best)) break;
      written.push(best);
      next = [best];
    }
    return written;
  }
  /** Without the tokens that the checkpoint never writes. @param {Float32Array} logits */
  function allowed(logits) {
    for (const id of generation.suppress) logits[id] = -Infinity;
    return logits;
  }

  // What the head says.

  /** @param {Numbers} chances @returns {Guess[]} */
  const top = (chances, k = TOP) => ranked(chances).slice(0, k).map((id) => ({[hasClasses ? 'label' : 'token']: nameOf(id), id, p: chances[id]}));
  /** @param {Rows} states @param {number} at the answer of one position, or of the whole text @returns {Float32Array} */
  const scores = (states, at) => (hasClasses ? model.classify(states) : model.project(rows(1, states.d, rowOf(states, at)))).data;
  /** @param {Float32Array} logits */
  function chancesOf(logits) {
    if (!hasClasses || config.problem === 'single_label') return softmax(logits.slice());
    return config.problem === 'multi_label' ? logits.map((x) => 1 / (1 + Math.exp(-x))) : logits;
  }
  /** @param {Pass} one */
  function position({source, target}) {
    if (!isEncoder) return (isPair ? target : source).length - 1;
    if (tokenizer.mask !== null && source.includes(tokenizer.mask)) return source.indexOf(tokenizer.mask);
    const plain = source.map((_, at) => at).filter((at) => !tokenizer.specials.has(source[at]));
    return plain.at(-1) ?? source.length - 1;
  }
  /** @param {Pass} one */
  const textOf = ({target}) => (isPair ? tokenizer.decode(target.slice(1)) : null);
  /** @param {Pass} one @returns {Result} */
  function output(one) {
    if (config.head === 'none') return {kind: 'states', top: [], words: `${one.states.n} vectors of ${config.d_model} numbers: this model has no head that predicts.`};
    const at = position(one), guesses = top(chancesOf(scores(one.states, at)));
    if (hasClasses) return {kind: 'classes', top: guesses};
    if (isPair) return {kind: 'translation', text: textOf(one) ?? '', top: guesses};
    return {kind: !isEncoder ? 'next' : one.source[at] === tokenizer.mask ? 'mask' : 'token', at, top: guesses};
  }
  /** How far changes turned the states. @param {Pass} one @param {Pass} before */
  function moved(one, before) {
    if (one.states.n !== before.states.n) return {mean: null, tokens: []};
    const cosine = (/** @type {Numbers} */ a, /** @type {Numbers} */ b) => {
      let [ab, aa, bb] = [0, 0, 0];
      for (let i = 0; i < a.length; i++) [ab, aa, bb] = [ab + a[i] * b[i], aa + a[i] ** 2, bb + b[i] ** 2];
      return ab / Math.sqrt(aa * bb);
    };
    const mean = (/** @type {Rows} */ {n, d, data}) => Array.from({length: d}, (_, i) => Array.from({length: n}, (__, t) => data[t * d + i]).reduce((a, b) => a + b) / n);
    return {mean: cosine(mean(before.states), mean(one.states)), tokens: Array.from({length: one.states.n}, (_, t) => cosine(rowOf(before.states, t), rowOf(one.states, t)))};
  }
  /** @param {Run} run */
  function lengthNote(run) {
    if (run.second === null) return null;
    const [n, m] = [read(run.text).length, read(run.second).length];
    if (m >= n) return m === n ? null : `The second text has ${m} tokens, the first ${n}: positions are patched one to one.`;
    return `The second text has ${m} tokens, the first ${n}: only the first ${m} are patched.`;
  }

  // Attention.

  /** One head's weights, T rows of S. @param {Pass} one @returns {Rows} */
  function weightsOf({seen}, site = '', head = 0) {
    const [q, k] = ['q', 'k'].map((name) => /** @type {Rows} */ (seen.get(`${site}.${name}`)));
    const all = rows(q.n, k.n);
    for (let t = 0; t < q.n; t++) {
      const {first, weights} = model.weightsOf(q, k, site, head, t);
      all.data.set(weights, t * k.n + first);
    }
    return all;
  }
  const sitesOf = (name = 'attention') => {
    const [stack, kind] = {attention: ['', 'attention'], encoder: ['encoder.', 'attention'], decoder: ['decoder.', 'attention'], cross: ['decoder.', 'cross']}[name] ?? [];
    return Array.from({length: name === 'encoder' || !isPair ? config.n_layers : config.n_decoder_layers}, (_, layer) => `${stack}blocks.${layer}.${kind}`);
  };
  /** The largest weight in each cell of a grid. @param {Rows} weights */
  function pooled({n, d, data}, box = [0, n, 0, d], tall = 1, wide = 1) {
    const [top, bottom, left, right] = box;
    const cells = rows(Math.ceil((bottom - top) / tall), Math.ceil((right - left) / wide));
    for (let r = top; r < bottom; r++) {
      for (let c = left; c < right; c++) {
        const at = Math.floor((r - top) / tall) * cells.d + Math.floor((c - left) / wide);
        cells.data[at] = Math.max(cells.data[at], data[r * d + c]);
      }
    }
    return cells;
  }
  /** As `size` rows of `size`, 255 √weight: ranges overlap where they do not divide. @param {Rows} weights @param {Uint8Array} into */
  function thumbnail({n, d, data}, size = 0, into) {
    for (let r = 0; r < size; r++) {
      for (let c = 0; c < size; c++) {
        let most = 0;
        for (let t = Math.floor((r * n) / size); t < Math.ceil(((r + 1) * n) / size); t++) {
          for (let s = Math.floor((c * d) / size); s < Math.ceil(((c + 1) * d) / size); s++) most = Math.max(most, data[t * d + s]);
        }
        into[r * size + c] = Math.round(Math.sqrt(Math.min(1, most)) * 255);
      }
    }
  }
  /** Where a head attends, as numbers: inside/head_scores.py. @param {Rows} weights @param {Pass} one */
  function headScores({n, d, data}, one, site = '') {
    const isCross = site.endsWith('.cross'), ids = site.startsWith('decoder.') ? one.target : one.source;
    /** @type {{[name: string]: number[]}} */
    const found = {entropy: [], previous: [], first: [], induction: [], alignment: []};
    for (let t = 0; t < n; t++) {
      const row = data.subarray(t * d, (t + 1) * d);
      const over = (/** @type {(s: number) => boolean} */ chosen) => row.reduce((sum, weight, s) => (chosen(s) ? [sum[0] + weight, sum[1] + 1] : sum), [0, 0]);
      found.entropy.push(row.reduce((sum, weight) => sum - (weight > 0 ? weight * Math.log(weight) : 0), 0));
      if (isCross) {
        const [sum, many] = config.source_vocab_size || t + 1 >= n ? [0, 0] : over((s) => one.source[s] === one.target[t + 1]);
        if (many) found.alignment.push(sum);
        continue;
      }
      if (t) found.previous.push(row[t - 1]), found.first.push(row[0]);
      const [sum, many] = over((s) => s > 0 && s < t && ids[s - 1] === ids[t]);
      if (many) found.induction.push(sum);
    }
    return Object.fromEntries(Object.entries(found).map(([name, values]) => [name, values.length ? values.reduce((a, b) => a + b) / values.length : null]));
  }

  // Lens and sweep.

  /** The residual stream of the last stack before the first block and after each. @param {Pass} one */
  const streams = ({seen}) => ['embedding', ...Array.from({length: depth}, (_, i) => `blocks.${i}.residual`)].map((name) => /** @type {Rows} */ (seen.get(prefix + name)));
  /** The token after each position; where there is none, or in an encoder, the model's own prediction. @param {Pass} one */
  function following(one, at = 0) {
    const ids = isPair ? one.target : one.source;
    return !isEncoder && at + 1 < ids.length ? ids[at + 1] : ranked(scores(one.states, at))[0];
  }
  /** @param {Pass} one */
  function lensAt(one, layer = 0, at = 0, next = following(one, at)) {
    const logits = scores(model.finish(streams(one)[layer]), at);
    return {logits, next, rank: logits.filter((value) => value > logits[next]).length + 1};
  }
  /** The positions whose loss a sweep measures, and the tokens they should predict. @param {Pass} one @returns {[number[][], string]} */
  function targetsOf(one) {
    const ids = isPair ? one.target : one.source, last = ids.length - 1;
    const own = (at = 0) => [at, ranked(scores(one.states, at))[0]];
    if (hasClasses) return [[own()], `change in the loss of the class it chose, '${nameOf(own()[1])}', in nats`];
    if (isEncoder) return [[own(position(one))], `change in the loss of its answer at place ${position(one)}, in nats`];
    if (!last) return [[own(last)], 'change in the loss of the token it would write, in nats'];
    const all = ids.slice(1).map((id, at) => [at, id]);
    return all.length > 128 ? [all.slice(-128), 'mean change in the loss of the last 128 tokens, in nats'] : [all, 'mean change in the loss of each token after those before it, in nats'];
  }
  /** @param {Rows} states @param {number[][]} targets */
  function loss(states, targets) {
    let [nats, logit] = [0, 0];
    for (const [at, id] of targets) {
      const logits = scores(states, at);
      nats -= Math.log(softmax(Float64Array.from(logits))[id]) / targets.length;
      logit += logits[id] / targets.length;
    }
    return {loss: nats, logit};
  }

  /** The id of a token, given its text or its name on the page. */
  function idOf(token = '') {
    const ids = encode(token, false, true);
    const id = ids.length === 1 && ids[0] !== tokenizer.unk ? ids[0] : Array.from({length: config.vocab_size}, (_, at) => at).find((at) => tokenizer.name(at) === token);
    if (id === undefined) throw new Error(`“${token}” is not one token but ${ids.length}: ${ids.slice(0, 8).map(tokenizer.name).join(', ') || 'none'}; take one of these.`);
    return id;
  }

  /** @type {{[name: string]: (params: any) => {[field: string]: any}}} */
  const answers = {
    read({run}) {
      const one = pass(run), before = run.changes.length ? pass(plainOf(run)) : null;
      return {source: side(one.source), target: isPair ? side(one.target) : null, target_text: textOf(one), truncated: false,
        answer: output(one), plain: before && output(before), moved: before && config.head === 'none' ? moved(one, before) : null, note: lengthNote(run)};
    },
    grid({run, attention = isPair ? 'encoder' : 'attention', layer, size = 32}) {
      const one = pass(run), site = sitesOf(attention)[layer];
      const H = /** @type {Rows} */ (one.seen.get(`${site}.q`)).d / E, thumbs = new Uint8Array(H * size * size);
      const found = Array.from({length: H}, (_, head) => {
        const weights = weightsOf(one, site, head);
        thumbnail(weights, size, thumbs.subarray(head * size * size));
        return {head, ...headScores(weights, one, site)};
      });
      return {site, scores: found, arrays: {thumbs}, shapes: {thumbs: [H, size, size]}};
    },
    map({run, site, head, box, most = 256}) {
      const weights = weightsOf(pass(run), site, head), [top, bottom, left, right] = box ?? [0, weights.n, 0, weights.d];
      const [tall, wide] = [Math.ceil((bottom - top) / most), Math.ceil((right - left) / most)];
      const cells = pooled(weights, [top, bottom, left, right], tall, wide);
      const rowmax = Float32Array.from({length: bottom - top}, (_, r) => Math.max(...rowOf(weights, top + r)));
      return {T: weights.n, S: weights.d, box: [top, bottom, left, right], pooled: [tall, wide],
        arrays: {map: cells.data, rowmax}, shapes: {map: [cells.n, cells.d], rowmax: [rowmax.length]}};
    },
    row({run, site, head, row}) {
      const weights = rowOf(weightsOf(pass(run), site, head), row);
      return {site, head, arrays: {weights}, shapes: {weights: [weights.length]}};
    },
    flow({run, attention}) {
      const one = pass(run), H = config.n_heads;
      /** @param {string} site: half the mean of the heads, and half of what was there before */
      const stepOf = (site) => {
        const maps = Array.from({length: H}, (_, head) => weightsOf(one, site, head)), {n} = maps[0], step = rows(n, n);
        step.data.forEach((_, i) => (step.data[i] = maps.reduce((sum, map) => sum + map.data[i], 0) / H / 2 + (i % (n + 1) ? 0 : 0.5)));
        return step;
      };
      /** @param {Rows} below @param {Rows} step */
      const onto = (below, step) => {
        const {n} = step, next = rows(n, n);
        for (let t = 0; t < n; t++) {
          for (let s = 0; s < n; s++) for (let c = 0; step.data[t * n + s] && c < n; c++) next.data[t * n + c] += step.data[t * n + s] * below.data[s * n + c];
        }
        return next;
      };
      const all = sitesOf(attention ?? (isPair ? 'encoder' : 'attention')).map(stepOf).reduce(onto);
      const by = Math.ceil(all.n / 256), cells = pooled(all, undefined, by, by);
      return {T: all.n, pooled: [by, by], words: 'How much of each input may have reached each final state, if attention were all there is. It is not an explanation.',
        arrays: {rollout: cells.data}, shapes: {rollout: [cells.n, cells.d]}};
    },
    lens({run, first = 0, n}) {
      const one = pass(run), total = hasClasses ? 1 : one.states.n, end = Math.min(total, first + (n ?? 256));
      const at = Array.from({length: end - first}, (_, i) => first + i), layers = streams(one).length;
      const next = at.map((place) => following(one, place));
      const p = new Float32Array(layers * at.length), rank = new Int32Array(p.length);
      const tokens = streams(one).map((_, layer) => at.map((place, i) => {
        const found = lensAt(one, layer, place, next[i]), best = ranked(found.logits)[0];
        p[layer * at.length + i] = softmax(found.logits.slice())[best];
        rank[layer * at.length + i] = found.rank;
        return nameOf(best);
      }));
      return {layers, T: at.length, first, total, tokens, of: next.map(nameOf), arrays: {p, rank}, shapes: {p: [layers, at.length], rank: [layers, at.length]}};
    },
    cell({run, layer, position: at, k = 10}) {
      const {logits, next, rank} = lensAt(pass(run), layer, at);
      return {top: top(softmax(logits.slice()), k), rank, of: nameOf(next)};
    },
    sweep({run, attention, layer, token}) {
      const one = pass(run), site = sitesOf(attention)[layer];
      const named = token && (hasClasses ? config.labels.indexOf(token) : idOf(token));
      /** @type {[number[][], string]} */
      const [targets, measure] = token ? [[[position(one), named]], `change in the loss of '${nameOf(named)}', in nats`] : targetsOf(one);
      const base = loss(one.states, targets);
      const effects = Array.from({length: config.n_heads}, (_, head) => {
        /** @type {Look['change']} */
        const change = (at, out, start) => {
          const changed = one.change ? one.change(at, out, start) : out;
          return at !== site ? changed : {...changed, data: changed.data.map((x, i) => (Math.floor((i % out.d) / E) === head ? 0 : x))};
        };
        const memory = isPair ? model.encode(one.source, {change}) : undefined;
        const without = loss(model.states(isPair ? one.target : one.source, {change}, {}, memory), targets);
        return {site, head, d_loss: without.loss - base.loss, d_logit: without.logit - base.logit};
      });
      return {effects, measure, base};
    },
    follow({run, ...asked}) {
      const one = pass(run), encodes = asked.site.startsWith('encoder.'), isCross = asked.site.endsWith('.cross');
      const logits = encodes || config.head === 'none' ? null : scores(one.states, asked.position);
      const chances = logits && chancesOf(logits);
      const ids = asked.site.startsWith('decoder.') ? one.target : one.source;
      return {...trace(model, one, asked), token: nameOfToken(ids[asked.position]), keys: (isCross ? one.source : ids).map(nameOfToken),
        end: encodes ? 'memory' : config.head === 'none' ? 'states' : hasClasses ? 'classes' : isEncoder ? 'token' : 'next',
        top: logits && chances ? ranked(logits).slice(0, 10).map((id) => ({[hasClasses ? 'label' : 'token']: nameOf(id), id, logit: logits[id], p: chances[id]})) : []};
    },
    neighbours({token, k = 12}) {
      const table = rows(config.vocab_size, config.d_model, model.tensors['tokens.weight'].data);
      const id = idOf(token);
      const length = (/** @type {Numbers} */ x) => Math.sqrt(Array.from(x).reduce((sum, value) => sum + value * value, 0)) || 1;
      const here = rowOf(table, id), size = length(here);
      const cosines = Array.from({length: table.n}, (_, at) => rowOf(table, at).reduce((sum, value, i) => sum + value * here[i], 0) / size / length(rowOf(table, at)));
      const near = ranked(cosines).filter((at) => at !== id).slice(0, k).map((at) => ({token: tokenizer.name(at), id: at, cosine: cosines[at]}));
      return {token: tokenizer.name(id), id, near};
    },
    step({run, ids = [], seed = 0, repetition_penalty: penalty = 1, ...options}) {
      const one = pass({...run, target: isPair ? run.target : null}), history = [...(isPair ? prompt() : one.source), ...ids];
      checkLength(history, targetLimit);
      const states = model.states(history, {change: one.change}, {}, one.memory);
      const logits = scores(states, states.n - 1), raw = softmax(logits.slice());
      const {final, removed} = filtered(penalised(allowed(logits.slice()), history, penalty), options);
      const left = softmax(final.slice()), drawn = options.temperature === 0 ? ranked(final)[0] : draw(final, seed, ids.length);
      return {top: ranked(raw).slice(0, 40).map((id) => ({id, token: nameOf(id), p_raw: raw[id], p_final: left[id], removed_by: removed.get(id) ?? null})),
        drawn, drawn_token: nameOf(drawn), kept: left.filter((p) => p > 0).length, text: tokenizer.decode(ids), is_end: generation.eos.includes(drawn)};
    },
  };
  return {answers, pass, scores};
}
