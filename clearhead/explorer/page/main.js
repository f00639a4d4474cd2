/** The page: its header, the tabs, the run above the panels, and the one panel that is open. */

import {ask, isOld} from './ask.js';
import {makeState, readChanges} from './state.js';
import {button, complain, dark, el, note, quoted, repaint, tip} from './draw.js';
import {makeStrip} from './tokens.js';
import {startWalk} from './walk.js';
import * as model from './model.js';
import * as heads from './heads.js';
import * as lens from './lens.js';
import * as flow from './flow.js';
import * as intervene from './intervene.js';
import * as positions from './positions.js';
import * as sandbox from './sandbox.js';
import * as geometry from './geometry.js';
import * as cost from './cost.js';
import * as generate from './generate.js';

/** @type {PanelKind[]} */
const PANELS = [
  {id: 'model', name: 'Model', reads: true, ...model},
  {id: 'heads', name: 'Attention', reads: true, early: true, ...heads},
  {id: 'lens', name: 'Lens', reads: true, can: ({lens}) => lens, ...lens},
  {id: 'flow', name: 'Flow', reads: true, can: ({flow}) => flow !== false, ...flow},
  {id: 'intervene', name: 'Intervene', reads: true, early: true, ...intervene},
  {id: 'generate', name: 'Generate', changed: true, can: ({generate, translate}) => generate || translate, ...generate},
  {id: 'positions', name: 'Positions', ...positions},
  {id: 'sandbox', name: 'Sandbox', ...sandbox},
  {id: 'geometry', name: 'Geometry', can: ({geometry}) => geometry, ...geometry},
  {id: 'cost', name: 'Cost', ...cost},
];
const RUN_KEYS = ['model', 'text', 'target', 'second', 'changes'];

const place = (id = '') => /** @type {Box} */ (document.getElementById(id));
const root = place('panel');
const runBox = place('run');
const state = makeState();
/** @type {Map<Node, (place: Place | null) => void>} */
const focusHearers = new Map();
/** @type {{kind: PanelKind, update: Update} | null} */
let open = null;
/** @type {ReturnType<typeof makeStrip> | null} */
let strip = null;

/** @type {Page} */
const page = {
  state, models: [], reading: null, ask,
  model: () => page.models.find((model) => model.name === state.get('model')) ?? page.models[0],
  run() {
    const model = page.model();
    const target = model.shape === 'encoder_decoder' ? state.get('target', state.get('text') ? '' : model.example_target ?? '') : '';
    const changes = readChanges(state.get('changes'));
    return {model: model.name, text: state.get('text', model.example), target: target || null,
      second: changes.some((change) => change.how === 'patch') ? state.get('second') || null : null, changes};
  },
  async load(box, lane, name, params, show) {
    box.setAttribute('aria-busy', 'true');
    try {
      const answer = await ask(name, params, lane);
      if (!box.isConnected) return;
      complain(box, null);
      // What belongs to an earlier request is not seen under an error.
      box.classList.remove('failed');
      show(answer);
    } catch (error) {
      // Something newer is on its way; the box stays busy until that arrives.
      if (isOld(error)) return;
      complain(box, error);
      box.classList.add('failed');
    }
    box.removeAttribute('aria-busy');
  },
  focus(where) {
    for (const [node, hear] of focusHearers) {
      if (node.isConnected) hear(where);
      else focusHearers.delete(node);
    }
  },
  onFocus: (node, hear) => void focusHearers.set(node, hear),
  shade: (side, weights) => strip?.shade(side, weights),
};

/** The panels this model and this page have. */
const kindsHere = () => PANELS.filter((kind) => (kind.can?.(page.model().can) ?? true) && (window.CLEARHEAD_START?.panels?.includes(kind.id) ?? true));

function header() {
  const model = page.model();
  const select = el('select', {'aria-label': 'Model', onchange: () =>
    state.set({model: select.value, text: null, target: null, second: null, changes: null, site: null, head: null, attention: null})},
    ...page.models.map(({name}) => el('option', {value: name, selected: name === model.name}, name)));
  const tabs = kindsHere().map((kind) => el('button', {type: 'button', role: 'tab', id: `tab-${kind.id}`, 'aria-controls': 'panel',
    onclick: () => state.set({panel: kind.id})}, kind.name));
  const list = el('div', {role: 'tablist', class: 'tabs', 'aria-label': 'Panels', onkeydown: (event) => {
    const at = tabs.findIndex((tab) => tab === document.activeElement);
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1}[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    next.focus();
    next.click();
  }}, ...tabs);
  const theme = button('', () => state.set({theme: dark ? 'light' : 'dark'}), 'quiet');
  theme.id = 'theme';
  const link = button('Copy link', () => void copyLink(link), 'quiet');
  place('top').replaceChildren(button('Skip to the panel', () => root.focus(), 'skip'),
    el('div', {class: 'bar-top'}, el('h1', {}, 'clearhead'), select,
      button('Show me around', () => startWalk(page), 'quiet'), link, theme),
    list);
}

/** @param {HTMLElement} control */
async function copyLink(control) {
  state.flush();
  const done = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  control.textContent = done ? 'Copied' : 'Not allowed here: copy the address';
  setTimeout(() => (control.textContent = 'Copy link'), 2000);
}

/** On every panel: that heads are changed, and whether this panel shows it. */
function tellChanges() {
  const many = readChanges(state.get('changes')).length;
  const box = place('changed');
  box.hidden = !many;
  const shows = open && (open.kind.reads || open.kind.changed);
  box.replaceChildren(el('span', {class: 'badge'}, many === 1 ? '1 head changed' : `${many} heads changed`),
    note(shows ? '' : 'This panel shows the model without the change.'), button('Undo all', () => state.set({changes: null}), 'quiet'));
}

/** A panel that looks at the run is hidden while there is none: its pictures belong to an earlier one. */
function showPanel() {
  root.hidden = Boolean(open?.kind.reads) && runBox.classList.contains('failed');
}

/** Theme: what was chosen, else what the system says. */
function paintTheme() {
  const chosen = state.get('theme');
  document.documentElement.dataset.theme = chosen || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  repaint();
  const control = document.getElementById('theme');
  if (control) control.textContent = dark ? 'Light' : 'Dark';
}

/** Open the panel the address names. */
function openPanel() {
  const kinds = kindsHere();
  const kind = kinds.find(({id}) => id === state.get('panel')) ?? kinds[0];
  for (const tab of document.querySelectorAll('[role=tab]')) {
    const chosen = tab.id === `tab-${kind.id}`;
    tab.setAttribute('aria-selected', String(chosen));
    tab.setAttribute('tabindex', chosen ? '0' : '-1');
    if (chosen) tab.parentElement?.scrollTo(/** @type {Box} */ (tab).offsetLeft - 60, 0);
  }
  if (open?.kind === kind) return;
  tip(null);
  page.focus(null);
  root.replaceChildren();
  root.className = kind.id;
  root.setAttribute('role', 'tabpanel');
  root.setAttribute('aria-labelledby', `tab-${kind.id}`);
  runBox.hidden = !kind.reads;
  open = {kind, update: kind.panel(root, page)};
  showPanel();
  tellChanges();
  if (page.reading || !kind.reads) open.update();
}

/** Read the run again; panels follow when the answer is here. */
function read() {
  page.reading = null;
  // The first layer's heads are known long before the answer; asked for first, they are seen first.
  if (open?.kind.early) open.update(true);
  return page.load(runBox, 'read', 'read', {run: page.run()}, (answer) => {
    page.reading = /** @type {Reading} */ (answer);
    strip?.update();
    showPanel();
    open?.update();
  }).then(showPanel);
}

function changeModel() {
  page.reading = null;
  open = null;
  header();
  paintTheme();
  strip = makeStrip(runBox, page);
  openPanel();
  const named = state.get('model');
  complain(place('top'), named && named !== page.model().name
    ? `There is no model ${quoted(named)} here. This is ${quoted(page.model().name)}; the list above has all of them.` : null);
}

async function begin() {
  paintTheme();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paintTheme);
  await page.load(root, 'models', 'models', {}, (answer) => {
    page.models = answer.models;
    const left = window.CLEARHEAD_START?.left_out;
    if (left) document.querySelector('footer')?.append(note(`This exported page is not whole: ${left}.`));
    changeModel();
    state.subscribe(['theme'], paintTheme);
    state.subscribe(['model'], changeModel);
    state.subscribe(['panel'], openPanel);
    state.subscribe(['changes'], tellChanges);
    state.subscribe(RUN_KEYS, () => void read());
    void read();
  });
}

void begin();
