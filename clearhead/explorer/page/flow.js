/** Flow: attention of all layers multiplied through (rollout), under its warning. */

import {card, el, keptChoice} from './draw.js';
import {attentionOf} from './grid.js';
import {makeMap} from './map.js';

/** @type {PanelKind['panel']} */
export function panel(root, page) {
  const one = card('Rollout', 'The mean attention of each layer, half of it staying in place, multiplied layer on layer (Abnar and Zuidema, 2020).');
  one.append(el('p', {class: 'caution'}, el('b', {}, 'This is not an explanation. '), 'It takes attention for all there is: what the values hold and what the feed-forward layers do is left out.'));
  root.append(one);
  const names = page.model().attentions.map(({name}) => name).filter((name) => name !== 'cross');
  if (names.length > 1) one.append(keptChoice(page.state, 'flow.stack', chosen(), 'Stack', names));
  const show = makeMap(one, page, 'Rollout map');
  function chosen() {
    const wanted = page.state.get('flow.stack', attentionOf(page).name);
    return names.includes(wanted) ? wanted : names[0];
  }
  function update() {
    const side = chosen() === 'decoder' ? 'target' : 'source';
    void show({title: 'Rollout', rows: side, cols: side, hard: false, asked: () => ['flow', {run: page.run(), attention: chosen()}]});
  }
  page.state.subscribe(['flow.stack'], update, one);
  return update;
}
