/** Lessons: five things to see, each an address (#lesson=induction), and the words of the field with their meanings. */

import {button, card, el, row} from './draw.js';

/** @typedef {{title: string, needs: (model: Model) => boolean, lack: string, state: {[key: string]: string}, words: string[]}} Lesson */

const writes = (/** @type {Model} */ {shape, inputs}) => shape === 'decoder' && inputs === 'tokens';
const NO_DECODER = 'It needs a model that writes text, such as: clearhead explore SmolLM2-135M-Instruct.Q4_1.gguf';

/** @type {{[name: string]: Lesson}} */
const LESSONS = {
  induction: {title: 'Induction: “this came before, so it comes again”', needs: writes, lack: NO_DECODER,
    state: {panel: 'heads', sort: 'induction', text: 'Red, nine, moon, tree, glass. Red, nine, moon, tree,'},
    words: ['The text says the same list twice. In the second list the model can copy.', 'An induction head attends from a token to the one that followed the same token earlier. On the map this is a second line, parallel to the diagonal and below it. Heads are ordered by how much they do it.', 'Then open Intervene, click the first of these heads, and watch whether the prediction falls.']},
  sink: {title: 'Attention sinks: heads that attend to the first token', needs: writes, lack: NO_DECODER,
    state: {panel: 'heads', sort: 'first', text: 'Once upon a time there was a small town by the sea, and nobody there owned a clock.'},
    words: ['Weights after a softmax always sum to 1, so a head can not attend to nothing.', 'Many heads give most of their weight to the first token when they have nothing to do. The values there are usually small, so the weight has little effect.', 'Change the first word: the bright first column stays.']},
  ioi: {title: 'Mary and John: where the name is decided', needs: (model) => writes(model) && model.can.patches && model.can.names,
    lack: 'It needs a model that writes text and has each name as one token, such as: clearhead explore SmolLM2-135M-Instruct.Q4_1.gguf',
    state: {panel: 'patching', text: 'When Mary and John went to the store, John gave a drink to', second: 'When Mary and John went to the store, Mary gave a drink to', token: ' John', against: ' Mary'},
    words: ['In the text, John gives, so the drink goes to Mary. In the other text it goes to John. The two differ in one token.', 'Each cell copies one state from the other text into this one. A full colour means that this state alone changes the answer to the other name.', 'In the first layers it is the state of the token that differs, in the last layers that of the last token: heads in between have copied the name there.']},
  dates: {title: 'Dates: what a translator looks at while it writes', needs: ({shape, inputs}) => shape === 'encoder_decoder' && inputs === 'tokens', lack: 'It needs a translator: clearhead demo dates, then clearhead explore on the folder it names.',
    state: {panel: 'heads', attention: 'cross', sort: 'alignment', text: 'martes, 7 de marzo de 1989'},
    words: ['The model reads a date in words and writes it as numbers. Each row of the map is a token that it writes, each column a token that it reads.', 'Find the row of the month, 3: it attends to the word “marzo”. A ring marks the largest weight of each row.', 'The model writes year, month, day; the text says day, month, year. So the rings move from right to left.']},
  patches: {title: 'A picture in patches', needs: ({inputs}) => inputs === 'patches', lack: 'It needs a model of pictures: clearhead demo digits, then clearhead explore on the folder it names.',
    state: {panel: 'heads', sort: 'entropy', text: 'sample:3'},
    words: ['The picture is cut into square patches. Each is a token, as a word is in a text.', 'Point at a patch: the picture shows how much the chosen head attends from there to each of the others. The large map has the same numbers.', 'Heads are ordered by entropy: the first ones attend to a few patches, the last ones to many.']},
};

/** The lesson that the address names, set up: what the address says itself stays. @param {Page} page */
export function startLesson(page) {
  const {state} = page;
  const lesson = LESSONS[state.get('lesson')];
  if (!lesson) return;
  const model = lesson.needs(page.model()) ? page.model() : page.models.find(lesson.needs);
  if (!model) return;
  const given = state.all();
  // It was set up before, and the reader has gone on from there.
  if (given.panel) return;
  state.set({...lesson.state, ...given, panel: lesson.state.panel, model: model.name});
}

/** Its card, above the panel. @param {HTMLElement} place @param {Page} page */
export function showLesson(place, page) {
  const names = Object.keys(LESSONS), name = page.state.get('lesson'), lesson = LESSONS[name];
  place.hidden = !lesson;
  if (!lesson) return place.replaceChildren();
  const fits = lesson.needs(page.model()) || page.models.some(lesson.needs);
  const next = names[(names.indexOf(name) + 1) % names.length];
  place.replaceChildren(card(lesson.title, '', ...(fits ? lesson.words : [lesson.lack]).map((words) => el('p', {}, words)),
    row(button(`Next: ${LESSONS[next].title.split(':')[0]}`, () => openLesson(page, next)), button('Close', () => page.state.set({lesson: null}), 'quiet'))));
}

/** @param {Page} page */
function openLesson(page, name = '') {
  const {state} = page;
  state.set({...Object.fromEntries(Object.keys(state.all()).filter((key) => !['model', 'theme'].includes(key)).map((key) => [key, null])), lesson: name});
  startLesson(page);
}

/** Links to all of them. @param {Page} page */
export const lessonLinks = (page) => card('Five things to see', 'Each opens the page at a text and a panel, with a few sentences.',
  row(...Object.entries(LESSONS).map(([name, {title}]) => button(title, () => openLesson(page, name), 'quiet'))));
