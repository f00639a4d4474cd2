/** The model itself, drawn from its config: the first thing one sees, and the way to every other panel. */

import {card, el, note, short, tableBox} from './draw.js';

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const model = page.model().name;
  const words = note();
  const drawing = el('div', {class: 'diagram'});
  const table = tableBox('As a table', 'The parts of the model');
  const box = card('The model', 'Read it from the bottom up. The thick line is the residual stream: each part reads it and adds to it. Choose a part to see what it does with your text.', drawing, words, table.node);
  root.append(box);
  /** @param {Event} event */
  const open = ({target}) => {
    const part = target instanceof Element ? target.closest('[data-panel]') : null;
    if (!(part instanceof SVGElement)) return false;
    const {panel: wanted = '', attention = ''} = part.dataset;
    // A model without a head has no lens, a model of pictures no geometry: the cost of the part is always there.
    const panel = document.getElementById(`tab-${wanted}`) ? wanted : 'cost';
    page.state.set({panel, ...(panel === 'heads' ? {attention, site: null, head: null} : {})});
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
    void page.load(box, 'diagram', 'diagram', {model}, ({svg, parts, total}) => {
      const drawn = new DOMParser().parseFromString(svg, 'image/svg+xml').documentElement;
      drawing.replaceChildren(document.importNode(drawn, true));
      words.textContent = `${short(total)} parameters. The number on each part is its share, of all layers together.`;
      table.show(['stack', 'part', 'size', 'parameters'], parts.map((/** @type {{stack: string, name: string, words: string, params: number}} */ part) =>
        [part.stack, part.name, part.words, part.params.toLocaleString('en')]));
    });
  };
}
