"use strict";
// Copies tables as Markdown, LaTeX or CSV, and saves plots as SVG. Without it the page only lacks these buttons.
const escapes = {
  "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}",
  "|": "\\textbar{}", '"': "\\textquotedbl{}", "[": "{[}", "*": "{*}",
  ...Object.fromEntries([..."-,'`!?"].map((sign) => [sign, sign + "{}"])),
};
const latex = (text) => text.replace(/[\\~^<>|"&%$#_{}]|([-,'`])(?=\1)|[!?](?=`)|^[\[*]/g, (sign) => escapes[sign] || "\\" + sign);  // as report/latex.py
const isFormula = (text) => /^[=+\-@]/.test(text) && isNaN(text.replaceAll(",", ""));
const cell = (text) => (isFormula(text) ? "'" + text : text).replaceAll('"', '""');
const forms = {
  Markdown: ([head, ...rows]) =>
    [head, head.map(() => "---"), ...rows].map((row) => `| ${row.map((text) => text.replaceAll("|", "\\|")).join(" | ")} |`),
  LaTeX: ([head, ...rows], sides) => {
    const line = (row) => row.map(latex).join(" & ") + " \\\\";
    const begin = `\\begin{tabular}{${sides.join("")}}`;
    return [begin, "\\toprule", line(head), "\\midrule", ...rows.map(line), "\\bottomrule", "\\end{tabular}"];
  },
  CSV: (rows) => rows.map((row) => row.map((text) => `"${cell(text)}"`).join(",")),
};
const textOf = (part) => part.textContent.trim().replace(/\s+/g, " ");
const badgesOf = (part) => [...part.querySelectorAll(".badge")].map(textOf).join(", ");
const textsOf = (table) => [...table.rows].map((row) => [...row.cells].map((part) => badgesOf(part) || textOf(part)));
const sidesOf = (table) => [...table.rows[0].cells].map((part) => (getComputedStyle(part).textAlign === "right" ? "r" : "l"));

function copy(text) {
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}

function save(svg, name) {
  const style = getComputedStyle(document.documentElement);
  const painted = svg.outerHTML.replace(/var\((--\w+)\)/g, (_, role) => style.getPropertyValue(role).trim());
  const links = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"';
  const link = document.createElement("a");
  link.href = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(painted.replace("<svg", `<svg ${links}`));
  link.download = name + ".svg";
  link.click();
}

for (const menu of document.querySelectorAll("[data-copy]")) {
  const table = menu.nextElementSibling.querySelector("table");
  for (const [form, render] of Object.entries(forms)) {
    const button = menu.appendChild(document.createElement("button"));
    button.textContent = form;
    button.addEventListener("click", () => copy(render(textsOf(table), sidesOf(table)).join("\n")));
  }
}
for (const menu of document.querySelectorAll("[data-save]")) {
  const pictures = menu.closest("figure").querySelectorAll(".picture svg");
  pictures.forEach((svg, index) => {
    const button = menu.appendChild(document.createElement("button"));
    button.textContent = pictures.length > 1 ? `SVG ${index + 1}` : "SVG";
    button.addEventListener("click", () => save(svg, menu.dataset.save + (pictures.length > 1 ? `-${index + 1}` : "")));
  });
}
const open = () => document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details")?.setAttribute("open", "");
addEventListener("hashchange", open);
open();
