/** Saving: a picture as PNG, or as SVG by drawing it again on a canvas that writes down what is drawn; and the whole page as a file. */

import {button, colour, el, font, row} from './draw.js';

/** Hand a file to the browser. @param {Blob} blob */
export function download(name = '', blob) {
  const link = el('a', {href: URL.createObjectURL(blob), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
const nameOf = (label = '') => label.toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '') || 'picture';

const LINE = 20;
/** The names of a chart's lines, from `top` on; returns where they end. @param {Ink} ink @param {FigureKind} kind */
function drawLegend(ink, kind, top = 0, width = 0) {
  let x = 56, y = top;
  ink.font = font(12);
  ink.textAlign = 'left';
  ink.textBaseline = 'middle';
  for (const {name, tint, dash} of kind.legend?.() ?? []) {
    const key = tint ? 26 : 0, wide = key + ink.measureText(name).width + 18;
    if (x > 56 && x + wide > width) [x, y] = [56, y + LINE];
    ink.strokeStyle = ink.fillStyle = colour(tint ?? '--soft');
    ink.lineWidth = 2;
    ink.setLineDash(dash ? [5, 4] : []);
    ink.beginPath();
    ink.moveTo(x, y + LINE / 2);
    ink.lineTo(x + Math.max(0, key - 8), y + LINE / 2);
    ink.stroke();
    ink.fillText(name, x + key, y + LINE / 2);
    x += wide;
  }
  return y + LINE;
}

/** Buttons for a figure. @param {HTMLCanvasElement} canvas @param {FigureKind} kind @param {(ink: Ink, width: number, height: number) => void} paint */
export function saveRow(canvas, kind, paint) {
  const below = () => (kind.legend ? drawLegend(/** @type {Ink} */ (el('canvas').getContext('2d')), kind, 0, canvas.clientWidth) : 0);
  const png = () => {
    const ratio = canvas.width / canvas.clientWidth, height = canvas.clientHeight + below();
    const copy = el('canvas', {width: canvas.width, height: Math.round(height * ratio)});
    const ink = /** @type {Ink} */ (copy.getContext('2d'));
    ink.fillStyle = colour('--card');
    ink.fillRect(0, 0, copy.width, copy.height);
    ink.drawImage(canvas, 0, 0);
    ink.scale(ratio, ratio);
    drawLegend(ink, kind, canvas.clientHeight, canvas.clientWidth);
    copy.toBlob((blob) => blob && download(`${nameOf(kind.label)}.png`, blob));
  };
  const svg = () => {
    const {clientWidth: width, clientHeight: height} = canvas;
    const file = new SvgInk(), ink = /** @type {Ink} */ (/** @type {unknown} */ (file));
    ink.fillStyle = colour('--card');
    ink.fillRect(0, 0, width, height + below());
    paint(ink, width, height);
    drawLegend(ink, kind, height, width);
    download(`${nameOf(kind.label)}.svg`, new Blob([file.file(width, height + below())], {type: 'image/svg+xml'}));
  };
  return row(el('span', {}, 'Save as'), button('PNG', png, 'link', `Save ${kind.label} as PNG`), button('SVG', svg, 'link', `Save ${kind.label} as SVG`));
}

/** Buttons for a drawing that is SVG. @param {() => string} draw @param {() => string} name */
export function saveSvg(draw, name, what = 'the drawing') {
  const png = () => {
    const image = el('img', {alt: ''});
    image.onload = () => {
      const copy = el('canvas', {width: 2 * image.width, height: 2 * image.height});
      copy.getContext('2d')?.drawImage(image, 0, 0, copy.width, copy.height);
      copy.toBlob((made) => made && download(`${name()}.png`, made));
    };
    image.src = `data:image/svg+xml,${encodeURIComponent(draw())}`;
  };
  const svg = () => download(`${name()}.svg`, new Blob([draw()], {type: 'image/svg+xml'}));
  return [el('span', {}, `Save ${what} as`), button('PNG', png, 'link', `Save ${what} as PNG`), button('SVG', svg, 'link', `Save ${what} as SVG`)];
}

/** The open panel as one drawing: what it shows now, its own styles in it. @param {HTMLElement} panel */
function drawPanel(panel) {
  const copy = /** @type {HTMLElement} */ (panel.cloneNode(true));
  const both = (/** @type {string} */ kind) => /** @type {[any, any][]} */ ([...panel.querySelectorAll(kind)].map((node, i) => [node, copy.querySelectorAll(kind)[i]]));
  for (const [node, copied] of both('input')) {
    copied.setAttribute('value', node.value);
    copied.toggleAttribute('checked', node.checked);
  }
  for (const [node, copied] of both('textarea')) copied.textContent = node.value;
  for (const [node, copied] of both('option')) copied.toggleAttribute('selected', node.selected);
  for (const [node, copied] of both('canvas').reverse()) {
    const image = el('img', {src: node.toDataURL(), alt: ''});
    // The page's policy allows no style attribute in words.
    Object.assign(image.style, {display: 'block', width: `${node.clientWidth}px`, height: `${node.clientHeight}px`});
    copied.replaceWith(image);
  }
  const styles = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText).join('\n');
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${panel.offsetWidth}" height="${panel.offsetHeight}" data-theme="${document.documentElement.dataset.theme}"><style>${escape(styles)}</style>` +
    `<foreignObject width="100%" height="100%"><body xmlns="${panel.namespaceURI}">${clean(new XMLSerializer().serializeToString(copy))}</body></foreignObject></svg>`;
}
/** Buttons for the open panel. @param {HTMLElement} panel */
export const savePanel = (panel) => row(...saveSvg(() => drawPanel(panel), () => `clearhead-${panel.className}`, 'this panel'));

/** XML has no control characters, which tokens may have. */
const clean = (text = '') => text.replace(/[^\t\n\x20-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, '\ufffd');
const escape = (/** @type {unknown} */ text) => clean(String(text)).replace(/[&<>"]/g, (letter) => ({'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'}[letter] ?? ''));
const n = (value = 0) => Number(value.toFixed(2));

/** What the page's drawings use of a canvas's context, as SVG. */
class SvgInk {
  out = '';
  path = '';
  clips = 0;
  fillStyle = '#000';
  strokeStyle = '#000';
  lineWidth = 1;
  globalAlpha = 1;
  font = '12px sans-serif';
  textAlign = 'left';
  textBaseline = 'middle';
  imageSmoothingEnabled = true;
  direction = 'ltr';
  dash = '';
  transform = '';
  clipped = '';
  /** @type {Record<string, unknown>[]} */
  saved = [];
  measure = /** @type {Ink} */ (el('canvas').getContext('2d'));
  save() {
    const {out, path, clips, saved, measure, ...state} = this;
    saved.push(state);
  }
  restore() {
    Object.assign(this, this.saved.pop());
  }
  translate(x = 0, y = 0) {
    this.transform += `translate(${n(x)} ${n(y)})`;
  }
  rotate(angle = 0) {
    this.transform += `rotate(${n((angle * 180) / Math.PI)})`;
  }
  setLineDash(dash = [0]) {
    this.dash = dash.join(' ');
  }
  beginPath() {
    this.path = '';
  }
  moveTo(x = 0, y = 0) {
    this.path += `M${n(x)} ${n(y)}`;
  }
  lineTo(x = 0, y = 0) {
    this.path += `${this.path ? 'L' : 'M'}${n(x)} ${n(y)}`;
  }
  /** @param {number[]} at */
  bezierCurveTo(...at) {
    this.path += `C${at.map(n).join(' ')}`;
  }
  rect(x = 0, y = 0, w = 0, h = 0) {
    this.path += `M${n(x)} ${n(y)}h${n(w)}v${n(h)}h${n(-w)}z`;
  }
  roundRect(x = 0, y = 0, w = 0, h = 0, r = 0) {
    const c = `a${r} ${r} 0 0 1 `;
    this.path += `M${n(x + r)} ${n(y)}h${n(w - 2 * r)}${c}${r} ${r}v${n(h - 2 * r)}${c}${-r} ${r}h${n(2 * r - w)}${c}${-r} ${-r}v${n(2 * r - h)}${c}${r} ${-r}z`;
  }
  ellipse(x = 0, y = 0, rx = 0, ry = 0) {
    this.path += `M${n(x - rx)} ${n(y)}a${n(rx)} ${n(ry)} 0 1 0 ${n(2 * rx)} 0a${n(rx)} ${n(ry)} 0 1 0 ${n(-2 * rx)} 0z`;
  }
  clip() {
    const id = `clip${++this.clips}`;
    this.out += `<clipPath id="${id}"><path d="${this.path}"${this.transform ? ` transform="${this.transform}"` : ''}/></clipPath>`;
    this.clipped = id;
  }
  /** @param {string} tag @param {string} more */
  put(tag, more, inside = '') {
    const inner = `<${tag} ${more}${this.globalAlpha < 1 ? ` opacity="${n(this.globalAlpha)}"` : ''}${this.transform ? ` transform="${this.transform}"` : ''}${inside ? `>${inside}</${tag}>` : '/>'}`;
    this.out += this.clipped ? `<g clip-path="url(#${this.clipped})">${inner}</g>` : inner;
  }
  lines() {
    return `fill="none" stroke="${this.strokeStyle}" stroke-width="${n(this.lineWidth)}"${this.dash ? ` stroke-dasharray="${this.dash}"` : ''}`;
  }
  fill() {
    this.put('path', `d="${this.path}" fill="${this.fillStyle}"`);
  }
  stroke() {
    this.put('path', `d="${this.path}" ${this.lines()}`);
  }
  fillRect(x = 0, y = 0, w = 0, h = 0) {
    this.put('rect', `x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" fill="${this.fillStyle}"`);
  }
  strokeRect(x = 0, y = 0, w = 0, h = 0) {
    this.put('rect', `x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" ${this.lines()}`);
  }
  measureText(text = '') {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }
  fillText(text = '', x = 0, y = 0) {
    const [, weight = '400', size = '12', family = 'sans-serif'] = /(\d+)? ?(\d+(?:\.\d+)?)px (.*)/.exec(this.font) ?? [];
    const anchor = {right: 'end', center: 'middle'}[this.textAlign] ?? 'start';
    this.put('text', `x="${n(x)}" y="${n(y)}" fill="${this.fillStyle}" font-family="${escape(family)}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}" dominant-baseline="${this.textBaseline === 'middle' ? 'central' : 'auto'}" xml:space="preserve"`, escape(text));
  }
  /** @param {HTMLCanvasElement} picture */
  drawImage(picture, x = 0, y = 0, w = picture.width, h = picture.height) {
    this.put('image', `href="${picture.toDataURL()}" x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" preserveAspectRatio="none"${this.imageSmoothingEnabled ? '' : ' style="image-rendering:pixelated"'}`);
  }
  file(width = 0, height = 0) {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">${this.out}</svg>`;
  }
}
