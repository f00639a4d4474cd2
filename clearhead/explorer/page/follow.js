/** Follow a token: one position, one head, every number from the embedding to the next token, step by step. */

import {ARROWS, bars, button, card, choice, colour, controls, el, extent, figure, font, liveOnly, note, percent, quoted, short, visible, within} from './draw.js';
import {attentionOf} from './grid.js';
import {carry} from './sandbox.js';

const SLOW = 3200, DRAWN = 900, MOST_KEYS = 24;
const still = () => matchMedia('(prefers-reduced-motion: reduce)').matches;

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const {state} = page;
  /** @type {Answer | null} */
  let told = null;
  /** @type {Stop[]} */
  let stops = [];
  let timer = 0, from = 0;
  const knobs = controls();
  const title = el('h2', {id: 'follow-title', tabindex: '-1'});
  const count = el('span', {class: 'note'});
  const words = note(), equation = el('p', {class: 'equation'});
  const before = button('Back', () => walk(at() - 1), 'quiet'), next = button('Next', () => walk(at() + 1), 'main');
  const play = button('Play', () => (timer ? rest() : (start(), walk(at() === stops.length - 1 ? 0 : at() + 1))), 'quiet');
  const line = el('ol', {class: 'stops', 'aria-label': 'Steps'});
  const stage = el('div', {class: 'stage'});
  const box = card('Follow a token', 'What the model computes for one token in one head, with its real numbers.', knobs, line);
  const step = el('section', {class: 'card step', 'aria-labelledby': 'follow-title', onkeydown: (event) => {
    const to = {ArrowRight: at() + 1, ArrowLeft: at() - 1}[event.key];
    // In a picture the arrows read its numbers.
    if (to === undefined || event.target instanceof HTMLCanvasElement) return;
    event.preventDefault();
    walk(to);
  }}, el('div', {class: 'row'}, before, next, play, count), title, words, equation, stage);
  root.append(box, step);

  const at = () => within(state.number('follow.step', 0), 0, Math.max(0, stops.length - 1));
  /** Where we are: the attention's layer, its head, and a token. */
  function place() {
    const {sites, n_heads: heads, name} = attentionOf(page);
    const site = state.get('site');
    const layer = sites.includes(site) ? sites.indexOf(site) : 0;
    const side = /** @type {Side} */ ((name === 'attention' || name === 'encoder' ? page.reading?.source : page.reading?.target) ?? page.reading?.source);
    const many = side.tokens.length;
    return {site: sites[layer], layer, head: within(state.number('head', 0), 0, heads[layer] - 1), heads: heads[layer], side,
      position: within(state.number('follow.at', page.reading?.answer.at ?? many - 1), 0, many - 1)};
  }
  function buildKnobs() {
    const {attentions} = page.model(), {layer, head, heads, side, position} = place();
    const {sites, name} = attentionOf(page);
    const range = (many = 0) => Array.from({length: many}, (_, i) => [String(i), String(i)]);
    knobs.replaceChildren(...[
      attentions.length < 2 ? '' : choice('Attention', attentions.map((one) => one.name), name, (attention) => state.set({attention, site: null, head: null, 'follow.at': null})),
      list('Token', side.tokens.map((token, i) => [String(i), `${i}: ${visible(token)}`]), String(position), (value) => state.set({'follow.at': value})),
      list('Layer', range(sites.length), String(layer), (value) => state.set({site: sites[Number(value)], head})),
      list('Head', range(heads), String(head), (value) => state.set({site: sites[layer], head: value})),
    ].filter(Boolean));
    liveOnly(knobs, 'follow');
  }
  function walk(to = 0) {
    if (to < 0 || to >= stops.length) return rest();
    state.set({'follow.step': to || null});
  }
  function start() {
    timer = window.setInterval(() => (box.isConnected ? walk(at() + 1) : rest()), SLOW);
    play.textContent = 'Pause';
  }
  function rest() {
    clearInterval(timer);
    timer = 0;
    play.textContent = 'Play';
  }
  /** The step that is open, its numbers drawn one after the other while it plays. */
  function show() {
    if (!told) return;
    const stop = stops[at()];
    from = timer && !still() ? performance.now() : 0;
    title.textContent = `${at() + 1}. ${stop.title}`;
    count.textContent = `${at() + 1} of ${stops.length}`;
    words.textContent = stop.words;
    equation.textContent = stop.equation;
    equation.hidden = !stop.equation;
    [before.disabled, next.disabled] = [at() === 0, at() === stops.length - 1];
    [...line.querySelectorAll('button')].forEach((one, i) => (i === at() ? one.setAttribute('aria-current', 'step') : one.removeAttribute('aria-current')));
    const here = /** @type {Box | null} */ (line.querySelector('[aria-current]'));
    if (here) line.scrollTo({left: here.offsetLeft - line.clientWidth / 2, behavior: 'instant'});
    // A button that is switched off keeps no focus: the keys go on working from the title.
    if ([before, next].some((one) => one.disabled && one === document.activeElement)) title.focus({preventScroll: true});
    stage.replaceChildren();
    stop.draw(stage, {shown: () => (from ? within((performance.now() - from) / DRAWN, 0, 1) : 1)});
    if (at() === stops.length - 1) rest();
  }
  function update() {
    const {site, head, position} = place();
    buildKnobs();
    void page.load(step, 'follow', 'follow', {run: page.run(), site, head, position}, (answer) => {
      told = answer;
      stops = stopsOf(answer, page);
      line.replaceChildren(...stops.map(({name}, i) => el('li', {}, button(name, () => walk(i), 'quiet'))));
      show();
    });
  }
  state.subscribe(['attention', 'site', 'head', 'follow.at'], () => page.reading && update(), box);
  state.subscribe(['follow.step'], show, box);
  return update;
}

/** A list to choose from, whatever its length. @param {string[][]} pairs @param {(value: string) => void} change */
function list(label = '', pairs, value = '', change) {
  const select = el('select', {onchange: () => change(select.value)}, ...pairs.map(([key, words]) => el('option', {value: key, selected: key === value}, words)));
  return el('label', {class: 'control'}, el('span', {class: 'note'}, label), select);
}

/** The steps of one walk, each with its words and its picture. @param {Answer} told @param {Page} page @returns {Stop[]} */
function stopsOf(told, page) {
  const {arrays: x, layer, layers, head, norm_first: pre, keys, scale, turned} = told;
  const width = x.embedding.length, E = x.q.length, config = page.model().config;
  const isCross = told.site.endsWith('.cross'), token = quoted(told.token);
  const isRoot = isRootOf(E, scale), isBiased = !isCross && BIASED.includes(config.positions);
  const [mine, all] = [`head ${head}`, `all heads of this ${isCross ? 'cross-attention' : 'attention'}`];
  const table = (/** @type {number} */ upTo) => (/** @type {Box} */ box, /** @type {Pace} */ pace) => keyTable(box, told, upTo, pace);
  /** @param {...(string | false | undefined)} told names, each with the words beside it */
  const vectors = (...told) => (/** @type {Box} */ box, /** @type {Pace} */ pace) => {
    const pairs = /** @type {[string, string][]} */ (told.filter(Boolean).map((one) => String(one).split(': ')));
    strips(box, pairs.filter(([name]) => x[name]).map(([name, words]) => ({name: words, values: x[name]})), pace);
  };
  const normName = config.norm === 'rms' ? 'RMS norm' : 'Layer norm';
  /** @type {(Stop | false)[]} */
  const stops = [
    {name: 'Embedding', title: `${token} becomes ${width} numbers`, equation: x.row ? `x = E[token]${config.embedding_scale ? ' · √d' : ''}${x.place ? ' + position' : ''}${config.embedding_norm ? ', normalised' : ''}` : '',
      words: x.row ? `The token’s row of the embedding table${x.place ? ', plus a vector for its position' : '. Its position is used later, in attention'}.` : 'A patch or a frame enters as a vector.',
      draw: vectors('row: the token’s row', 'place: position', 'embedding: what enters the first block')},
    {name: 'Stream', title: layer || isCross ? `After ${layer === 1 ? '1 block' : `${layer} blocks`}${isCross ? ' and self-attention' : ''}` : 'The residual stream', equation: '',
      words: `This vector is the residual stream at ${token}. Every part reads it and adds to it.`, draw: vectors('embedding: at the start', 'stream: before this attention')},
    pre && config.norm !== 'none' && {name: 'Norm', title: normName, equation: config.norm === 'rms' ? 'x / rms(x) · w' : '(x − mean) / std · w + b',
      words: 'The vector is brought to one scale before attention reads it.', draw: vectors('stream: before', 'input: after')},
    {name: 'Q, K, V', title: `Query, keys and values of ${mine}`, equation: `q = W_q x${turned ? ', turned by its position' : ''}    k = W_k y${turned ? ', turned' : ''}    v = W_v y`,
      words: `The query of ${token} will be compared with the key of each ${isCross ? 'source token' : 'token'}. The values are what is then averaged.${turned ? ' Rotary positions turn queries and keys, so that scores depend on distance.' : ''}`,
      draw(box, pace) {
        strips(box, [{name: `q of ${token}`, values: x.q}], pace);
        stack(box, 'Keys', keys, x.k, E, pace);
        stack(box, 'Values', keys, x.v, E, pace);
        box.append(sandboxDoor(told, page));
      }},
    {name: 'Scores', title: 'The query times each key', equation: 'q · k', words: `The dot product of the query with each key: the sum of ${E} products.`, draw: table(1)},
    {name: 'Scale', title: isRoot ? 'Divided by √d' : `Multiplied by ${short(scale)}`, equation: `q · k × ${short(scale)}${isBiased ? ' + bias of the distance' : ''}`,
      words: `${isRoot ? `A sum of ${E} products can be large, and from large scores the softmax gives nearly all weight to one token. So scores are divided by √${E}.` : `This model multiplies scores by ${short(scale)}, not by 1/√${E}.`}${isBiased ? ' A bias for the distance between the two tokens is added.' : ''}`, draw: table(2)},
    {name: 'Mask', title: 'Tokens that are hidden get −∞', equation: 'score = −∞ where hidden',
      words: Array.from(x.allowed).every(Boolean) ? 'Nothing is hidden from this token.' : 'The mask hides some tokens from this one. Their score becomes −∞, so their weight becomes 0.', draw: table(3)},
    {name: 'Softmax', title: 'Scores become weights', equation: 'weight = e^score / Σ e^score', words: 'Weights are positive and sum to 1. This is one row of the attention map.', draw: table(4)},
    {name: 'Mix', title: 'The weighted sum of the values', equation: 'Σ weight · v', words: `The output of ${mine}: the sum of all values, each times its weight.`,
      draw(box, pace) {
        const most = order(x.weights).slice(0, 6).filter((s) => x.weights[s] > 0);
        strips(box, [...most.map((s) => ({name: `${x.weights[s].toFixed(3)} × v of ${quoted(keys[s])}`, values: x.v.subarray(s * E, (s + 1) * E), shade: x.weights[s]})), {name: 'their sum, with the rest', values: x.out}], pace);
      }},
    {name: 'W_O', title: `Back to ${width} numbers`, equation: 'attention = Σ over heads W_O[head] · mix', words: `W_O turns each head’s ${E} numbers into a vector of the stream. Here is ${mine} alone, and the sum of ${all}.`,
      draw: vectors(`out: the mix`, `from_head: from ${mine}`, `added: ${all}`)},
    {name: 'Add', title: 'Added to the stream', equation: pre ? 'x + attention' : 'norm(x + attention)', words: pre ? 'The stream keeps what it had.' : `The sum is normalised, as in the paper (${normName}).`,
      draw: vectors('stream: the stream', 'added: from attention', `after: ${pre ? 'their sum' : 'their sum, normalised'}`)},
    {name: 'Feed-forward', title: 'Feed-forward', equation: config.gated ? 'W_down ( f(W_gate x) · W_up x )' : 'W_down f(W_up x)',
      words: `Computed for this token alone: ${width} numbers become ${x.hidden.length}, with the activation f = ${config.feedforward}, and then ${width} again.`,
      draw: vectors(pre && 'forward_input: in, normalised', !pre && 'forward_input: in', 'hidden: hidden', 'forward: out')},
    {name: 'Add', title: 'Added again', equation: pre ? 'x + feed-forward' : 'norm(x + feed-forward)', words: `Block ${layer} is done.`,
      draw: vectors('middle: the stream', 'forward: from the feed-forward', 'residual: after this block')},
    {name: 'Last', title: layer + 1 < layers ? `Through ${layers - layer - 1} more ${layers - layer === 2 ? 'block' : 'blocks'}` : 'The last block',
      equation: pre && config.norm !== 'none' ? `${normName} of the last stream` : '', words: layer + 1 < layers ? 'Each further block does the same with its own weights. The result is the final state.' : 'The result is the final state.',
      draw: vectors('residual: after this block', layer + 1 < layers && 'last: after the last block', pre && config.norm !== 'none' && 'final: final state, normalised')},
    told.top.length > 0 && {name: 'Logits', title: told.end === 'classes' ? 'A score for each class' : 'A score for each token', equation: 'logit = W · state',
      words: told.end === 'classes' ? 'The head reads the state that stands for the whole input.' : `The dot product of the final state at ${token} with a vector for each token of the vocabulary. The highest:`, draw: (box) => logitTable(box, told.top)},
    {name: 'End', title: {next: 'The next token', token: 'The token at this place', classes: 'The class', memory: 'Memory', states: 'A state'}[/** @type {string} */ (told.end)] ?? '',
      equation: told.top.length ? 'p = e^logit / Σ e^logit' : '', words: {memory: 'The encoder ends here: this vector is what the decoder’s cross-attention reads keys and values from.',
        states: 'This model has no head: the final state is its answer.', next: `What the model expects after ${token}.`, token: `What the model expects in the place of ${token}.`}[/** @type {string} */ (told.end)] ?? '',
      draw: (box, pace) => (told.top.length ? void box.append(bars(told.top.slice(0, 6))) : strips(box, [{name: 'final state', values: x.final}], pace))},
  ];
  return /** @type {Stop[]} */ (stops.filter(Boolean));
}

/** Vectors over one another, a cell a number: blue above 0, orange below. Pointing at a cell, or its arrows, read it.
 * @param {Box} root @param {{name: string, values: Numbers, shade?: number}[]} vectors @param {Pace} pace */
function strips(root, vectors, {shown}) {
  const high = 54, bar = 26;
  let [line, cell] = [-1, 0];
  const read = el('p', {class: 'readout', role: 'status'}, 'Point at a cell to read its number.');
  const sizes = vectors.map(({values}) => Math.max(1e-9, ...extent(values).map(Math.abs)));
  const tell = () => `${vectors[line].name}, number ${cell + 1} of ${vectors[line].values.length}: ${vectors[line].values[cell].toFixed(6)}`;
  const made = figure(root, {
    label: `Numbers: ${vectors.map(({name}) => name).join('; ')}. Arrow keys read them`, height: () => vectors.length * high,
    draw(ink, width) {
      const many = shown();
      vectors.forEach(({name, values, shade = 1}, i) => {
        const top = i * high + 20, wide = width / values.length;
        ink.fillStyle = colour('--soft');
        ink.font = font(13);
        ink.fillText(name, 0, i * high + 9);
        const until = Math.ceil(values.length * within(many * vectors.length - i, 0, 1));
        for (let j = 0; j < until; j++) {
          ink.globalAlpha = (0.06 + 0.94 * Math.abs(values[j] / sizes[i])) * (shade < 1 ? 0.25 + 0.75 * shade : 1);
          ink.fillStyle = colour(values[j] < 0 ? '--line-1' : '--line-0');
          ink.fillRect(j * wide, top, Math.max(1, wide - (wide > 5 ? 1 : 0)), bar);
        }
        ink.globalAlpha = 1;
        if (wide > 34) {
          ink.font = font(11);
          ink.textAlign = 'center';
          for (let j = 0; j < until; j++) {
            ink.fillStyle = colour(Math.abs(values[j] / sizes[i]) * shade > 0.55 ? '--card' : '--ink');
            ink.fillText(values[j].toFixed(2), (j + 0.5) * wide, top + bar / 2);
          }
          ink.textAlign = 'left';
        }
        if (line === i) {
          ink.strokeStyle = colour('--warm');
          ink.lineWidth = 2;
          ink.strokeRect(cell * wide, top - 1, Math.max(3, wide), bar + 2);
        }
      });
      if (many < 1) requestAnimationFrame(made.redraw);
    },
    hover(px, py) {
      const i = Math.floor(py / high), {values} = vectors[i] ?? {};
      if (!values) return null;
      [line, cell] = [i, within(Math.floor((px / made.canvas.clientWidth) * values.length), 0, values.length - 1)];
      made.redraw();
      read.textContent = tell();
      return values[cell].toFixed(6);
    },
    keys(key) {
      const [down, across] = ARROWS[key] ?? [0, 0];
      if (!down && !across) return false;
      line = within(line + (line < 0 ? 1 : down), 0, vectors.length - 1);
      cell = within(cell + across, 0, vectors[line].values.length - 1);
      read.textContent = tell();
      made.redraw();
      return true;
    },
  });
  made.canvas.after(read);
  const norm = (/** @type {Numbers} */ values) => Math.sqrt(Array.from(values).reduce((sum, value) => sum + value * value, 0));
  made.say(vectors.map(({name, values}) => `${name}: ${values.length} numbers, length ${short(norm(values))}`).join('. ') + '.',
    ['vector', 'first numbers'], vectors.map(({name, values}) => [name, Array.from(values).slice(0, 8).map((value) => value.toFixed(5)).join('  ')]));
}

/** A vector for each token, the last of them if there are many. @param {Box} root @param {string} title @param {string[]} tokens @param {Numbers} values @param {number} d @param {Pace} pace */
function stack(root, title, tokens, values, d, {shown}) {
  const first = Math.max(0, tokens.length - MOST_KEYS), many = tokens.length - first, high = 15, left = 84;
  const size = Math.max(1e-9, ...extent(values).map(Math.abs));
  const made = figure(root, {
    label: title, height: () => 20 + many * high,
    draw(ink, width) {
      const wide = (width - left) / d, until = Math.ceil(many * shown());
      ink.fillStyle = colour('--soft');
      ink.font = font(13);
      ink.fillText(first ? `${title} of the last ${many} of ${tokens.length} tokens` : title, 0, 9);
      for (let i = 0; i < until; i++) {
        ink.fillStyle = colour('--soft');
        ink.font = font(11.5);
        ink.globalAlpha = 1;
        ink.fillText(`\u2068${visible(tokens[first + i]).slice(0, 11)}\u2069`, 0, 20 + (i + 0.5) * high);
        for (let e = 0; e < d; e++) {
          const value = values[(first + i) * d + e];
          ink.globalAlpha = 0.06 + 0.94 * Math.abs(value / size);
          ink.fillStyle = colour(value < 0 ? '--line-1' : '--line-0');
          ink.fillRect(left + e * wide, 20 + i * high, Math.max(1, wide - (wide > 5 ? 1 : 0)), high - 1);
        }
      }
      ink.globalAlpha = 1;
      if (until < many) requestAnimationFrame(made.redraw);
    },
    hover(px, py) {
      const i = Math.floor((py - 20) / high), e = Math.floor(((px - left) / (made.canvas.clientWidth - left)) * d);
      return i < 0 || i >= many || e < 0 || e >= d ? null : `${visible(tokens[first + i])}, number ${e + 1}: ${values[(first + i) * d + e].toFixed(6)}`;
    },
  });
  made.say(`${title} of ${tokens.length} tokens, ${d} numbers each.`);
}

const BIASED = ['t5', 'alibi'];
const isRootOf = (d = 1, scale = 1) => Math.abs(scale * Math.sqrt(d) - 1) < 1e-4;

/** To the Sandbox, with this head's numbers. @param {Answer} told @param {Page} page */
function sandboxDoor({site, arrays: x, keys, position, scale}, page) {
  const isCausal = page.model().shape === 'decoder' || site.startsWith('decoder.');
  const last = isCausal ? position : Math.max(position, Math.min(keys.length, 6) - 1), d = x.q.length;
  const reason = site.endsWith('.cross') ? 'The Sandbox can not show cross-attention: there, queries and keys belong to different texts.'
    : BIASED.includes(page.model().config.positions) ? 'The Sandbox can not show this head: it adds a bias for the distance between tokens.'
      : scale !== 1 && !isRootOf(d, scale) ? `The Sandbox divides by √d or not at all; this head multiplies by ${short(scale)}.` : '';
  const address = reason ? null : carry(keys, {q: x.queries, k: x.k, v: x.v}, d, last, {causal: isCausal, scaled: isRootOf(d, scale)});
  return address ? el('p', {class: 'note'}, button('Open this head in the Sandbox', () => page.state.set(address)), ` ${Math.min(6, last + 1)} tokens, numbers rounded to 0.001; the weights there are over these tokens only.`)
    : note(reason || `The Sandbox shows up to 16 numbers a token; this head has ${d}.`);
}

/** Keys from the one that weighs most on. @param {Numbers} weights */
const order = (weights) => Array.from(weights, (_, i) => i).sort((a, b) => weights[b] - weights[a] || a - b);

/** Every key with its score, scaled, masked and as a weight: columns come one by one. @param {Box} root @param {Answer} told @param {number} upTo @param {Pace} pace */
function keyTable(root, {arrays: x, keys, scale}, upTo, {shown}) {
  const chosen = order(x.weights).slice(0, MOST_KEYS).sort((a, b) => a - b), E = x.q.length;
  const dot = (s = 0) => Array.from(x.q).reduce((sum, value, e) => sum + value * x.k[s * E + e], 0);
  const columns = ['token', 'q · k', `× ${short(scale)}`, 'masked', 'weight'].slice(0, upTo + 1);
  const body = el('tbody', {}, ...chosen.map((s) => {
    const cells = [dot(s).toFixed(4), x.scores[s].toFixed(4), x.allowed[s] ? x.scores[s].toFixed(4) : '−∞', x.weights[s].toFixed(5)].slice(0, upTo);
    const bar = el('i', {class: 'bar'});
    bar.style.setProperty('--p', String(x.weights[s]));
    return el('tr', {class: x.allowed[s] ? '' : 'hidden-key'}, el('th', {scope: 'row'}, el('bdi', {}, visible(keys[s]))),
      ...cells.map((text, i) => el('td', {class: i === upTo - 1 ? 'now' : i < upTo - 2 ? 'old' : ''}, text)), upTo === 4 && el('td', {class: 'wide'}, bar));
  }));
  const head = el('thead', {}, el('tr', {}, ...columns.map((name, i) => el('th', {scope: 'col', class: i && i < upTo - 1 ? 'old' : ''}, name)), upTo === 4 && el('td', {})));
  root.append(el('div', {class: 'scroll keys', tabindex: '0', role: 'region', 'aria-label': 'Scores and weights of each token'}, el('table', {}, head, body)));
  if (chosen.length < keys.length) root.append(note(`The ${chosen.length} tokens with the largest weights, of ${keys.length}.`));
  // While it plays, the new column comes row by row.
  const reveal = () => {
    const until = Math.ceil(body.rows.length * shown());
    [...body.rows].forEach((line, i) => line.classList.toggle('coming', i >= until));
    if (shown() < 1 && root.isConnected) requestAnimationFrame(reveal);
  };
  reveal();
}

/** @param {Box} root @param {(Guess & {logit: number})[]} top */
function logitTable(root, top) {
  root.append(el('div', {class: 'scroll keys', tabindex: '0', role: 'region', 'aria-label': 'Logits'}, el('table', {},
    el('thead', {}, el('tr', {}, ...['', 'logit', 'probability'].map((name) => el('th', {scope: 'col'}, name || 'token')))),
    el('tbody', {}, ...top.map(({token, label, logit, p}) => el('tr', {}, el('th', {scope: 'row'}, el('bdi', {}, visible(token ?? label))), el('td', {class: 'now'}, logit.toFixed(4)), el('td', {}, percent(p))))))));
}
