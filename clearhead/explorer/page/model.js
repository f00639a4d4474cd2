/** The model itself, drawn from its config: the first thing one sees, and the way to every other panel. */

import {card, el, note, row, short, tableBox} from './draw.js';
import {lessonLinks} from './lessons.js';
import {saveSvg} from './save.js';

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const model = page.model().name;
  const words = note();
  const saves = row();
  const drawing = el('div', {class: 'diagram'});
  const table = tableBox('As a table', 'The parts of the model');
  const box = card('The model', 'Read it from the bottom up. The thick line is the residual stream: each part reads it and adds to it. Choose a part to see what it does with your text.', drawing, words, saves, table.node);
  root.append(box, window.CLEARHEAD_ANSWERS ? '' : lessonLinks(page));
  /** @param {Event} event */
  const open = ({target}) => {
    const part = target instanceof Element ? target.closest('[data-panel]') : null;
    if (!(part instanceof SVGElement)) return false;
    const {panel: wanted = '', attention = ''} = part.dataset;
    // A model without a head has no lens, a model of pictures no geometry: the cost of the part is always there.
    const panel = document.getElementById(`tab-${wanted}`) ? wanted : 'cost';
    if (['heads', 'intervene', 'follow'].includes(panel)) page.state.set({attention, site: null, head: null});
    page.state.set({panel, ...(panel === 'intervene' && {neurons: 'last'})});
    return true;
  };
  drawing.addEventListener('click', open);
  drawing.addEventListener('keydown', (event) => {
    if ((event.key === 'Enter' || event.key === ' ') && open(event)) event.preventDefault();
  });
  let shown = false;
  return () => {
    if (shown) return;
    shown = true;
    void page.load(box, 'diagram', 'diagram', {model}, ({svg, file, parts, total}) => {
      const drawn = new DOMParser().parseFromString(svg, 'image/svg+xml').documentElement;
      drawing.replaceChildren(document.importNode(drawn, true));
      saves.replaceChildren(...saveSvg(() => file, () => `model-${model}`));
      const isWide = drawing.scrollWidth > drawing.clientWidth + 8;
      words.textContent = `${short(total)} parameters. On each part, of all layers together: its parameters, and its operations in a forward pass of the longest text.${isWide ? ' Scroll the drawing sideways to see the decoder.' : ''}`;
      table.show(['stack', 'part', 'size', 'operations', 'parameters'], parts.map((/** @type {{stack: string, name: string, words: string, params: number, flops: number}} */ part) =>
        [part.stack, part.name, part.words, part.flops.toLocaleString('en'), part.params.toLocaleString('en')]));
    });
  };
}
