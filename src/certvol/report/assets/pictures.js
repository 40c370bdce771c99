// Thumbnails. A sheet is decoded when one of its images is first shown; there are about a hundred sheets at most.
const gallery = data.gallery || null;
const pictures = gallery && gallery.pictures;
const sheets = new Map();

function sheetAddress(number) {
  if (sheets.has(number)) return sheets.get(number);
  const block = byId('sheet-' + number);
  if (!block) return null;
  const bytes = Uint8Array.from(atob(block.textContent.trim()), (c) => c.charCodeAt(0));
  const address = URL.createObjectURL(new Blob([bytes], { type: 'image/webp' }));
  sheets.set(number, address);
  return address;
}

// The place of an image among the thumbnails, or -1: of very many images, those in the middle have none.
function slotOf(image) {
  if (!pictures) return -1;
  if (image < pictures.skipFrom || !pictures.skipped) return image;
  return image < pictures.skipFrom + pictures.skipped ? -1 : image - pictures.skipped;
}

// A square frame of `side` pixels with the image in its true shape. Sheets come after this script in the page.
function pictureFrame(image, side, described) {
  const box = make('span', { class: 'frame' });
  const slot = slotOf(image);
  const shape = slot < 0 ? 0 : pictures.shapes[slot] / 100;
  if (described) { box.setAttribute('role', 'img'); box.setAttribute('aria-label', described); }
  if (!shape) { box.classList.add('none'); return box; }
  const inner = document.createElement('i');
  const width = shape >= 1 ? side : side * shape, height = shape >= 1 ? side / shape : side;
  const number = Math.floor(slot / pictures.perSheet), cell = slot % pictures.perSheet;
  const rows = Math.ceil(Math.min(pictures.perSheet, pictures.shapes.length - number * pictures.perSheet) / pictures.columns);
  inner.style.width = width + 'px';
  inner.style.height = height + 'px';
  inner.style.backgroundSize = `${width * pictures.columns}px ${height * rows}px`;
  inner.style.backgroundPosition = `${-width * (cell % pictures.columns)}px ${-height * Math.floor(cell / pictures.columns)}px`;
  if (pictures.cell <= 32) box.classList.add('tiny');
  const fill = () => { const address = sheetAddress(number); if (address) inner.style.backgroundImage = `url("${address}")`; return Boolean(address); };
  if (!fill()) addEventListener('DOMContentLoaded', fill, { once: true });
  box.append(inner);
  return box;
}
