/** One token followed, computed here: what follow_panel.py answers on a server. */

import {add, linear, rowOf, rows} from './forward.js';

/** @param {Computing} model @param {Pass} one @param {{site: string, head: number, position: number}} asked */
export function trace(model, one, {site, head, position}) {
  const {config, tensors, scale, isPair} = model, E = config.d_head;
  const cut = site.indexOf('blocks.'), prefix = site.slice(0, cut), [, layer, step] = site.slice(cut).split('.');
  const name = `${prefix}blocks.${layer}`, depth = prefix === 'decoder.' ? config.n_decoder_layers : config.n_layers;
  /** @param {string} at */
  const all = (at) => /** @type {Rows} */ (one.seen.get(at));
  /** One row of a site. @param {string} at */
  const here = (at) => rows(1, all(at).d, rowOf(all(at), position).slice());
  const ids = prefix === 'decoder.' ? one.target : one.source;
  const [q, k, v, out] = ['q', 'k', 'v', 'out'].map((part) => all(`${site}.${part}`));
  /** One head's numbers of every token. @param {Rows} x */
  const headOf = (x, at = 0) => rows(x.n, E, Float32Array.from({length: x.n * E}, (_, i) => x.data[Math.floor(i / E) * x.d + at * E + (i % E)]));
  const group = model.headOf(q, k, head);
  /** @type {{[name: string]: Rows}} */
  const arrays = {embedding: here(`${prefix}embedding`), q: rows(1, E, rowOf(headOf(q, head), position)), queries: headOf(q, head), k: headOf(k, group), v: headOf(v, group),
    out: rows(1, E, rowOf(headOf(out, head), position))};

  const row = model.embed([ids[position]], prefix === 'encoder.' && tensors['source.weight'] ? 'source' : 'tokens', false);
  const placed = model.place(model.embed([ids[position]], prefix === 'encoder.' && tensors['source.weight'] ? 'source' : 'tokens'), prefix, position);
  arrays.row = row;
  if (placed.data.some((value, i) => value !== row.data[i])) arrays.place = {...row, data: placed.data.map((value, i) => value - row.data[i])};

  const {first, weights} = model.weightsOf(q, k, site, head, position);
  const [scores, kept, allowed] = [rows(1, k.n), rows(1, k.n), rows(1, k.n)];
  for (let s = 0; s < k.n; s++) {
    for (let e = 0; e < E; e++) scores.data[s] += arrays.q.data[e] * arrays.k.data[s * E + e];
    scores.data[s] = scores.data[s] * scale + (step === 'cross' ? 0 : model.biasAt(prefix, head, s - (k.n - q.n + position)));
    const inside = s >= first && s < first + weights.length;
    [kept.data[s], allowed.data[s]] = inside ? [weights[s - first], 1] : [0, 0];
  }
  Object.assign(arrays, {scores, allowed, weights: kept});

  const normFirst = config.norm_first;
  let stream = here(layer === '0' ? `${prefix}embedding` : `${prefix}blocks.${Number(layer) - 1}.residual`);
  for (const kind of prefix === 'decoder.' && isPair ? ['attention', 'cross'] : ['attention']) {
    const outs = here(`${name}.${kind}.out`), added = model.part(outs, `${name}.${kind}.o_proj`);
    const after = normFirst ? add(stream, added) : model.norm(add(stream, added), `${name}.${kind}_norm`);
    if (kind === step) {
      const alone = rows(1, outs.d, outs.data.map((value, i) => (Math.floor(i / E) === head ? value : 0)));
      Object.assign(arrays, {stream, added, after, input: normFirst ? model.norm(stream, `${name}.${kind}_norm`) : stream,
        from_head: linear(alone, tensors[`${site}.o_proj.weight`])});
    }
    stream = after;
  }
  const hidden = here(`${name}.feedforward.hidden`);
  const last = here(`${prefix}blocks.${depth - 1}.residual`);
  Object.assign(arrays, {middle: stream, forward_input: normFirst ? model.norm(stream, `${name}.feedforward_norm`) : stream, hidden,
    forward: model.part(hidden, `${name}.feedforward.down`), residual: here(`${name}.residual`), last, final: model.finish(last, prefix)});
  return {site, layer: Number(layer), layers: depth, head, position, scale, norm_first: normFirst, turned: config.positions === 'rotary' && step !== 'cross',
    arrays: Object.fromEntries(Object.entries(arrays).map(([key, x]) => [key, x.data])),
    shapes: Object.fromEntries(Object.entries(arrays).map(([key, x]) => [key, ['queries', 'k', 'v'].includes(key) ? [x.n, x.d] : [x.d]]))};
}
