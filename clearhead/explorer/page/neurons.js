/** Two more ways to change a run, below the heads: single neurons of a feed-forward layer, and steering vectors. */

import {asks, button, controls, el, note, quoted, slider, textField, within} from './draw.js';
import {attentionOf, layerOf} from './grid.js';
import {readChanges, writeChanges} from './state.js';

const blockOf = (site = '') => site.replace(/\.\w+$/, '');
const signed = (value = 0) => `${value < 0 ? '−' : '+'}${Math.abs(value).toFixed(2)}`;

/** A part of the card that is closed at first; what it holds is asked for when it is open. @param {State} state @param {string} key @param {() => void} update @param {...Child} children */
function folded(state, key, title = '', update, ...children) {
  const node = el('details', {class: 'more', open: state.get(key) !== '', ontoggle: () => {
    if (node.open === (state.get(key) === '')) state.set({[key]: node.open ? 'last' : null});
    if (node.open) update();
  }}, el('summary', {}, title), ...children);
  return node;
}
/** Layers of the attention that is shown. @param {Page} page @param {string} key @param {() => void} update */
function layerChoice(page, key, update) {
  const blocks = () => attentionOf(page).sites.map(blockOf);
  const at = () => within(page.state.number(key, blocks().length - 1), 0, blocks().length - 1);
  const select = el('select', {onchange: () => page.state.set({[key]: select.value})});
  const fill = () => select.replaceChildren(...blocks().map((_, i) => el('option', {value: i, selected: i === at()}, String(i))));
  page.state.subscribe(['attention', key], () => {
    fill();
    update();
  }, select);
  fill();
  return {node: el('label', {class: 'control'}, el('span', {}, 'Layer'), select), block: () => blocks()[at()]};
}

/** The most active neurons of a layer. @param {Page} page @param {(site: string, neuron: number) => void} change */
export function neuronsBox(page, change) {
  const {state} = page;
  const words = note(), head = el('tr'), body = el('tbody');
  const inner = el('div', {class: 'stack'});
  const layer = layerChoice(page, 'neurons', update);
  const node = folded(state, 'neurons', 'Neurons of a feed-forward layer', update, inner);
  inner.append(note('A neuron is one number between the two matrices of a feed-forward layer. Press its number to change it as chosen above.'),
    controls(layer.node), words, el('div', {class: 'scroll keys', tabindex: '0', role: 'region', 'aria-label': 'Neurons: table'}, el('table', {class: 'neurons'}, el('thead', {}, head), body)));
  const site = () => `${layer.block()}.feedforward`;
  function mark() {
    const changes = readChanges(state.get('changes'));
    for (const one of body.querySelectorAll('button')) one.setAttribute('aria-pressed', String(changes.some((each) => each.site === site() && (each.head === null || String(each.head) === one.textContent))));
  }
  function update() {
    if (!node.open || !page.reading) return;
    void page.load(inner, 'neurons', 'neurons', {run: page.run(), block: layer.block()}, ({neurons, token, of}) => {
      /** @type {{neuron: number, value: number, strongest: {token: string}[], raises: string[]}[]} */
      const all = neurons;
      const raises = all.some((one) => one.raises.length);
      words.textContent = `The ${all.length} of ${of} neurons with the largest values at ${quoted(token)}.`;
      const columns = ['neuron', 'value here', 'largest at', raises && 'makes likelier'];
      head.replaceChildren(...columns.filter(Boolean).map((name) => el('th', {scope: 'col'}, String(name))));
      body.replaceChildren(...all.map((one) => el('tr', {}, el('th', {scope: 'row'}, button(String(one.neuron), () => change(site(), one.neuron), 'quiet', `Neuron ${one.neuron}`)), el('td', {}, signed(one.value)),
        el('td', {}, one.strongest.map((each) => quoted(each.token)).join('  ')), raises && el('td', {}, one.raises.map(quoted).join('  ')))));
      mark();
    });
  }
  node.hidden = !asks('neurons');
  return {node, update, mark};
}

/** A steering vector: from one text to another, added to every token's state after a layer. @param {Page} page */
export function steerBox(page) {
  const {state} = page;
  const layer = layerChoice(page, 'steer', () => {});
  const texts = /** @type {const} */ ([['second', 'Towards the text'], ['away', 'Away from the text']]).map(([key, label]) => {
    const {area, node} = textField(label, 1, (text) => state.set({[key]: text || null}));
    area.value = state.get(key);
    return {area, node, key};
  });
  const site = () => `${layer.block()}.residual`;
  const others = () => readChanges(state.get('changes')).filter((one) => one.how !== 'steer');
  const isOn = () => readChanges(state.get('changes')).some((one) => one.how === 'steer');
  /** @param {boolean} on */
  const put = (on) => state.set({changes: writeChanges([...others(), ...(on ? [{site: site(), head: null, how: /** @type {const} */ ('steer'), by: state.number('steer.by', 2)}] : [])]) || null});
  const strength = slider('Times', [-8, 8, 0.5], state.number('steer.by', 2), (by) => {
    state.set({'steer.by': by});
    if (isOn()) put(true);
  });
  const missing = note();
  const press = button('Steer', () => {
    const empty = texts.find(({area}) => !area.value.trim());
    missing.textContent = empty ? 'Write both texts first.' : '';
    if (empty) empty.area.focus();
    else put(!isOn());
  }, 'main');
  const node = folded(state, 'steer', 'Steer towards another text', () => {}, el('div', {class: 'stack'},
    note('The steering vector is the mean state of the tokens of one text after a layer, minus that of another text. It is added to the state of every token of this text, and of those that Generate writes.'),
    ...texts.map((one) => one.node), controls(layer.node, strength, press), missing));
  const mark = () => {
    press.textContent = isOn() ? 'Undo the steering' : 'Steer';
    for (const {area, key} of texts) if (document.activeElement !== area) area.value = state.get(key);
  };
  state.subscribe(['steer'], () => isOn() && put(true), node);
  node.hidden = !page.model().can.steer || !asks('neurons');
  mark();
  return {node, mark};
}

/** @param {Change} change */
export const nameOfSteering = ({site, by}) => `layer ${layerOf(site)}, steered × ${by}`;
