/** What a model costs over the length of its text: forecast, measured here, and what if it were larger. */
import {button, card, chart, choice, el, liveOnly, row, short, slider} from './draw.js';

/** Figures with their names. @param {Box} box @param {[string, string][]} told */
export function showStats(box, told) {
  box.replaceChildren(...told.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))));
}
const time = (seconds = 0) => (seconds >= 1 ? `${short(seconds)} s` : seconds >= 1e-3 ? `${short(seconds * 1e3)} ms` : `${short(seconds * 1e6)} µs`);
const X = {label: 'length in tokens', log: true};

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const {state} = page;
  const {config, shape, inputs, max_len, limit, name: model} = page.model();
  /** @type {{[key: string]: any}} */
  const now = {layers: config.n_layers, width: config.d_model, heads: config.n_heads, batch: 1, precision: 'fp32', mode: 'forward'};
  const keys = Object.keys(now).map((key) => `cost.${key}`);
  const get = (key = '') => state.number(`cost.${key}`, now[key]);
  const put = (key = '') => (/** @type {number | string} */ value) => state.set({[`cost.${key}`]: value === now[key] ? null : value});
  /** Names as on the drawing of the model: elsewhere on the page a head is one of attention's. @type {{[part: string]: string}} */
  const called = {feedforward: 'feed-forward', head: config.head === 'classes' ? 'classes' : 'output projection'};
  const x = Array.from({length: Math.floor(Math.log2(Math.max(8192, max_len))) - 3}, (_, i) => 2 ** (i + 4));
  /** @type {Numbers} */
  let seconds = [];
  /** @type {{x: number[], y: Numbers} | null} */
  let measured = null;
  const last = x.length - 1;
  const stats = el('dl', {class: 'stats'});
  const controls = el('div', {class: 'knobs'});
  const own = button('Back to the model as it is', () => {
    state.set(Object.fromEntries(keys.map((key) => [key, null])));
    buildControls();
  });
  const box = card('What it costs', 'Computed from the config by counting operations and bytes; no model is built. Change the sizes to see the cost of another model.', controls, row(own), stats);
  const work = card('Operations', 'The operations of attention grow with the square of the length, all others with the length.');
  const gauge = liveOnly(button('Measure here', measure), 'measure');
  // A model of pictures has one length only.
  const clock = card('Time on this machine', '', inputs === 'patches' ? null : row(gauge, el('span', {class: 'note'}, 'Runs the model at a few short lengths.')));
  const memory = card('Memory');
  const workChart = chart(work, 'Operations by length, one line a part', 300);
  const clockChart = chart(clock, 'Seconds by length: a lower bound, and measured');
  const memoryChart = chart(memory, 'Bytes by length, one line a kind');
  root.append(box, work, el('div', {class: 'columns'}, clock, memory));

  /** Each head needs an even share of the width. */
  const fit = (width = 0) => Math.max(1, Math.round(width / (2 * get('heads')))) * 2 * get('heads');
  function buildControls() {
    const modes = [['forward', 'reading'], ['train', 'training'], ['decode', 'one more token']];
    controls.replaceChildren(
      slider('Layers', [1, Math.max(48, now.layers)], get('layers'), put('layers')),
      slider('Width', [4, 14, 0.25], Math.log2(get('width')), (log) => put('width')(Math.round(2 ** log)), (log = 0) => String(fit(2 ** log))),
      slider('Heads', [1, Math.max(64, now.heads)], get('heads'), put('heads')),
      slider('Batch', [0, 8], Math.log2(get('batch')), (log) => put('batch')(2 ** log), (log = 0) => String(2 ** log)),
      choice('Precision', [['fp32', 'float32'], ['bf16', 'bfloat16'], 'int8', 'int4'], state.get('cost.precision', now.precision), put('precision')),
      choice('Task', modes.slice(0, shape === 'encoder' ? 2 : 3), state.get('cost.mode', now.mode), put('mode')));
    liveOnly(controls, 'cost');
  }
  function update() {
    /** @type {Params} */
    const changes = {};
    if (get('layers') !== now.layers) changes.n_layers = get('layers');
    if (get('heads') !== now.heads) changes.n_heads = get('heads');
    if (state.get('cost.width') || changes.n_heads) Object.assign(changes, {d_model: fit(get('width')), d_ff: Math.round((config.d_ff / now.width) * fit(get('width')))});
    own.disabled = keys.every((key) => !state.get(key));
    const params = {model, changes, batch: get('batch'), precision: state.get('cost.precision', now.precision), mode: state.get('cost.mode', now.mode), lengths: x};
    void page.load(box, 'cost', 'cost', params, show);
  }
  /** @param {Answer} answer */
  function show({arrays, parts, kinds, crossover, params}) {
    /** @param {Numbers} table @param {string[]} names @returns {Series[]} */
    const lines = (table, names) => names.map((name, i) => ({name, x, y: x.map((_, j) => table[i * x.length + j]), colour: i}));
    /** @param {Series[]} series */
    const rows = (series, unit = '') => x.map((length, j) => [length, ...series.map(({y}) => short(y[j]) + unit)]);
    const some = (/** @type {Series} */ {y}) => Array.from(y).some(Boolean);
    const names = parts.map((/** @type {string} */ name) => called[name] ?? name), work = lines(arrays.flops, names);
    workChart.show({x: X, y: {label: 'operations', log: true}, series: work.filter(some), marks: crossover ? [{x: crossover, label: 'attention = all others'}] : []});
    workChart.say(crossover ? `From ${crossover.toLocaleString('en')} tokens on, attention takes more operations than all other parts.` : 'Attention never takes more operations than all other parts.', ['length', ...names], rows(work, ''));
    const held = lines(arrays.bytes, kinds);
    const peak = held[kinds.indexOf('peak')].y;
    memoryChart.show({x: X, y: {label: 'bytes', log: true}, series: held.filter(some)});
    memoryChart.say(`At its peak ${short(peak[0])}B at ${x[0]} tokens, ${short(peak[last])}B at ${short(x[last])}.`, ['length', ...kinds], rows(held, 'B'));
    showStats(stats, [['parameters', short(params)], ['weights', `${short(held[kinds.indexOf('weights')].y[0])}B`]]);
    seconds = arrays.seconds;
    showTime();
  }
  function showTime() {
    const found = measured && {name: 'measured, the model as it is', ...measured, dots: true};
    clockChart.show({x: X, y: {label: 'seconds', log: true}, series: [{name: 'at least, by the best rate measured here', x, y: seconds, dash: true}, ...(found ? [found] : [])]});
    clockChart.say(`At least ${time(seconds[last])} at ${short(x[last])} tokens, by the best rate measured on this machine. While other programs run, that rate is too low.`,
      ['length', 'at least', 'measured'], x.map((length, j) => [length, time(seconds[j]), found && j < found.y.length ? time(found.y[j]) : '']));
  }
  async function measure() {
    gauge.disabled = true;
    const few = x.filter((length) => length <= Math.min(512, limit));
    await page.load(clock, 'measure', 'measure', {model, lengths: few}, (answer) => {
      measured = {x: answer.lengths, y: answer.arrays.seconds};
      showTime();
    });
    gauge.disabled = false;
  }
  buildControls();
  state.subscribe(keys, update, box);
  return update;
}
