/** The page: its header, the tabs, the run above the panels, and the one panel that is open. */

import {ask, isOld} from './ask.js';
import {makeState, readChanges} from './state.js';
import {asks, button, complain, dark, el, note, quoted, repaint, tip} from './draw.js';
import {makeStrip} from './tokens.js';
import {showLesson, startLesson} from './lessons.js';
import {download, savePanel} from './save.js';
import {startWalk} from './walk.js';
import {attributionPanel, patchingPanel} from './causes.js';
import * as model from './model.js';
import * as heads from './heads.js';
import * as follow from './follow.js';
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
  {id: 'follow', name: 'Follow a token', reads: true, can: ({follow}) => follow !== false, ...follow},
  {id: 'lens', name: 'Lens', reads: true, can: ({lens}) => lens, ...lens},
  {id: 'flow', name: 'Flow', reads: true, can: ({flow}) => flow !== false, ...flow},
  {id: 'intervene', name: 'Intervene', reads: true, early: true, ...intervene},
  {id: 'attribution', name: 'Attribution', reads: true, can: ({attribution}) => attribution && !window.CLEARHEAD_LOCAL, panel: attributionPanel},
  {id: 'patching', name: 'Patching', reads: true, can: ({patches}) => patches && asks('patches'), panel: patchingPanel},
  {id: 'generate', name: 'Generate', changed: true, can: ({generate, translate}) => generate || translate, ...generate},
  {id: 'positions', name: 'Positions', ...positions},
  {id: 'sandbox', name: 'Sandbox', ...sandbox},
  {id: 'geometry', name: 'Geometry', can: ({geometry}) => geometry, ...geometry},
  {id: 'cost', name: 'Cost', ...cost},
];
/** Milliseconds that one request may compute. */
const WITHIN = 80;
const RUN_KEYS = ['model', 'text', 'target', 'second', 'away', 'changes'];

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
  state, models: [], given: null, reading: null, ask,
  model: () => page.models.find((model) => model.name === state.get('model')) ?? page.models[0],
  run() {
    const model = page.model();
    const target = model.shape === 'encoder_decoder' ? state.get('target', state.get('text') ? '' : model.example_target ?? '') : '';
    const changes = readChanges(state.get('changes'));
    return {model: model.name, text: state.get('text', model.example), target: target || null,
      second: changes.some(({how}) => how === 'patch' || how === 'steer') ? state.get('second') || null : null,
      ...(changes.some(({how}) => how === 'steer') && {away: state.get('away')}), changes};
  },
  async load(box, lane, name, params, show) {
    box.setAttribute('aria-busy', 'true');
    try {
      const answer = await ask(name, params, lane);
      if (!box.isConnected) return;
      complain(box, null);
      // What belongs to an earlier request is not seen under an error.
      box.classList.remove('failed');
      // More of it is on its way: the box stays busy.
      if (show(answer)) return;
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
    state.set({model: select.value, text: null, target: null, second: null, away: null, changes: null, site: null, head: null, attention: null})},
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
  const save = button('Save page', () => void savePage(save), 'quiet');
  save.hidden = Boolean(window.CLEARHEAD_ANSWERS);
  place('top').replaceChildren(button('Skip to the panel', () => root.focus(), 'skip'),
    el('div', {class: 'bar-top'}, el('h1', {}, 'clearhead'), select,
      button('Show me around', () => startWalk(page), 'quiet'), link, save, theme),
    list);
}

/** @param {HTMLElement} control */
async function copyLink(control) {
  state.flush();
  const done = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  control.textContent = done ? 'Copied' : 'Not allowed here: copy the address';
  setTimeout(() => (control.textContent = 'Copy link'), 2000);
}

/** One file with the answers for this text, opened as it is seen now. @param {HTMLButtonElement} control */
async function savePage(control) {
  control.disabled = true;
  control.textContent = 'Computing…';
  await page.load(place('top'), 'export', 'export', {run: page.run(), state: state.all()}, ({page: text}) => download(`${page.model().name}.html`, new Blob([text], {type: 'text/html'})));
  control.disabled = false;
  control.textContent = 'Save page';
}

/** @param {Change} change */
const isHead = ({site, head}) => head !== null && !site.endsWith('feedforward');
/** On every panel: that heads are changed, and whether this panel shows it. */
function tellChanges() {
  const changes = readChanges(state.get('changes')), many = changes.length;
  const box = place('changed');
  box.hidden = !many;
  const shows = open && (open.kind.reads || open.kind.changed);
  box.replaceChildren(el('span', {class: 'badge'}, `${many} ${changes.every(isHead) ? 'head' : 'part'}${many === 1 ? '' : 's'} changed`),
    note(shows ? '' : 'This panel shows the model without the change.'), button('Undo all', () => state.set({changes: null}), 'quiet'));
}

const tellLesson = () => showLesson(place('lesson'), page);
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
  page.reading = page.given = null;
  // The first layer's heads are known long before the answer; asked for first, they are seen first.
  if (open?.kind.early) open.update(true);
  void readOn(page.run());
}
/** A few layers at a time: between two requests those for the first layers' heads are answered, and a text typed meanwhile ends it.
 * @param {Run} run */
async function readOn(run) {
  await page.load(runBox, 'read', 'read', window.CLEARHEAD_ANSWERS ? {run} : {run, within: WITHIN}, (answer) => {
    const first = !page.given;
    page.given = /** @type {Given} */ (answer);
    if (!answer.layers) page.reading = /** @type {Reading} */ (answer);
    strip?.update(first);
    showPanel();
    if (!answer.layers) open?.update();
    else {
      if (first && open?.kind.early) open.update(true);
      void readOn(run);
    }
    return answer.layers;
  });
  showPanel();
}

function changeModel() {
  page.reading = page.given = null;
  open = null;
  header();
  paintTheme();
  strip = makeStrip(runBox, page);
  openPanel();
  tellLesson();
  const named = state.get('model');
  complain(place('top'), named && named !== page.model().name
    ? `There is no model ${quoted(named)} here. This is ${quoted(page.model().name)}; the list above has all of them.` : null);
}

async function begin() {
  paintTheme();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paintTheme);
  await page.load(root, 'models', 'models', {}, (answer) => {
    page.models = answer.models;
    document.querySelector('footer')?.prepend(savePanel(root));
    const left = window.CLEARHEAD_START?.left_out;
    if (left) document.querySelector('footer')?.append(note(`This exported page is not whole: ${left}.`));
    const live = window.CLEARHEAD_START?.live;
    if (live) document.querySelector('footer')?.append(note(live));
    startLesson(page);
    changeModel();
    state.subscribe(['theme'], paintTheme);
    state.subscribe(['model'], changeModel);
    state.subscribe(['panel'], openPanel);
    state.subscribe(['changes'], tellChanges);
    state.subscribe(['lesson', 'model'], tellLesson);
    state.subscribe(RUN_KEYS, read);
    read();
  });
}

void begin();
