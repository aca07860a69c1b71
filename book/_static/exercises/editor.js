// A small editor for Python: a textarea over a coloured copy of its text.
//
// The textarea is real, so undo, selection, screen readers and phone keyboards work. All changes go through
// insertText, which keeps the browser's undo history whole.

(() => {
  const words = (text) => new Set(text.trim().split(/\s+/));
  const KEYWORDS = words(`and as assert async await break class continue def del elif else except finally for from
    global if import in is lambda match nonlocal not or pass raise return try while with yield`);
  const CONSTANTS = words("None True False");
  const BUILTINS = words(`abs all any bool bytes dict divmod enumerate filter float frozenset getattr hasattr hash
    int isinstance iter len list map max min next object print property range repr reversed round set sorted str sum
    super tuple type zip Exception IndexError KeyError MemoryError NotImplementedError RuntimeError StopIteration
    TypeError ValueError`);
  // A string that is not closed goes on to the end of its line, or, with three quotes, of the text.
  const STRING = String.raw`"""[\s\S]*?(?:"""|$(?![\s\S]))|'''[\s\S]*?(?:'''|$(?![\s\S]))` +
    String.raw`|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
  const TOKEN = new RegExp([
    String.raw`(?<comment>#[^\n]*)`,
    String.raw`(?<string>(?:\b[rbfu]{1,2})?(?:${STRING}))`,
    String.raw`(?<decorator>(?<=^[ \t]*)@[\w.]+)`,
    String.raw`(?<number>\b\d[\d_]*(?:\.[\d_]*)?(?:e[+-]?\d+)?\b|\b0x[\da-f_]+\b)`,
    String.raw`(?<word>[A-Za-z_]\w*)`,
  ].join("|"), "gim");
  const escape = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);

  function colour(text) {
    let html = "", at = 0, before = "";
    for (const match of text.matchAll(TOKEN)) {
      const { comment, string, decorator, number, word } = match.groups;
      let name = comment ? "c1" : string ? "s2" : decorator ? "nd" : number ? "mi" : "";
      if (word) {
        if (before === "def") name = "nf";
        else if (before === "class") name = "nc";
        else if (KEYWORDS.has(word)) name = "k";
        else if (CONSTANTS.has(word)) name = "kc";
        else if (BUILTINS.has(word)) name = "nb";
        else if (word === "self") name = "bp";
      }
      before = word || "";
      html += escape(text.slice(at, match.index));
      html += name ? `<span class="${name}">${escape(match[0])}</span>` : escape(match[0]);
      at = match.index + match[0].length;
    }
    return html + escape(text.slice(at)) + "\n";
  }

  // editor = new PracticeEditor(element, text, {label, onChange, onRun}); editor.text; editor.show(line)
  window.PracticeEditor = class {
    constructor(element, text, { label, onChange, onRun }) {
      this.onChange = onChange;
      this.onRun = onRun;
      this.leave = false;                               // Esc was pressed: the next Tab leaves the editor
      element.classList.add("practice-editor", "highlight");
      element.innerHTML = `<pre class="lines" aria-hidden="true"></pre><pre class="colours" aria-hidden="true"></pre>
        <textarea spellcheck="false" autocapitalize="off" autocomplete="off" autocorrect="off" wrap="off"></textarea>`;
      [this.lines, this.colours, this.area] = element.children;
      this.area.setAttribute("aria-label", label);
      this.area.value = text;
      this.area.addEventListener("input", () => { this.draw(); this.onChange(this.text); });
      this.area.addEventListener("keydown", (event) => this.key(event));
      this.area.addEventListener("blur", () => { this.leave = false; });
      this.draw();
    }

    get text() { return this.area.value; }

    // Replace everything, so that it can be undone.
    set text(text) {
      this.area.focus();
      this.area.select();
      this.insert(text);
      this.area.setSelectionRange(0, 0);
    }

    draw() {
      this.colours.innerHTML = colour(this.text);
      const count = this.text.split("\n").length;
      this.lines.textContent = Array.from({ length: count }, (_, i) => i + 1).join("\n") + "\n";
    }

    // Keep the cursor in view. The textarea is as large as its text, and what scrolls is the box around it.
    reveal() {
      const box = this.area.parentElement, before = this.text.slice(0, this.area.selectionEnd).split("\n");
      const height = (this.lines.clientHeight - 24) / (this.text.split("\n").length + 1);
      const bottom = 12 + before.length * height;
      box.scrollTop = Math.max(Math.min(box.scrollTop, bottom - height - 12), bottom + 24 - box.clientHeight);
      if (!before.pop()) box.scrollLeft = 0;
    }

    insert(text) {
      // execCommand is the one way to change a textarea that the browser can undo.
      if (!document.execCommand("insertText", false, text)) {
        this.area.setRangeText(text, this.area.selectionStart, this.area.selectionEnd, "end");
        this.area.dispatchEvent(new Event("input"));
      }
      this.reveal();
    }

    // Put the cursor at the start of a line, and the line into view.
    show(line) {
      const start = this.text.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
      this.area.focus();
      this.area.setSelectionRange(start, start + (this.text.slice(start).split("\n")[0].length));
      this.reveal();
    }

    // Replace the lines of the selection by change(line).
    eachLine(change) {
      const { area } = this;
      const start = this.text.lastIndexOf("\n", area.selectionStart - 1) + 1;
      let end = this.text.indexOf("\n", Math.max(area.selectionEnd - 1, area.selectionStart));
      if (end < 0) end = this.text.length;
      const changed = this.text.slice(start, end).split("\n").map(change).join("\n");
      area.setSelectionRange(start, end);
      this.insert(changed);
      area.setSelectionRange(start, start + changed.length);
    }

    key(event) {
      const { area } = this;
      const [start, end] = [area.selectionStart, area.selectionEnd];
      const before = this.text.slice(this.text.lastIndexOf("\n", start - 1) + 1, start);
      const command = event.ctrlKey || event.metaKey;
      if (command && event.key === "Enter") {
        event.preventDefault();
        this.onRun();
      } else if (event.key === "Escape") {
        this.leave = true;
        return;
      } else if (event.key === "Tab" && !this.leave && !command && !event.altKey) {
        event.preventDefault();
        if (event.shiftKey) this.eachLine((line) => line.replace(/^ {1,4}/, ""));
        else if (this.text.slice(start, end).includes("\n")) this.eachLine((line) => line && "    " + line);
        else this.insert(" ".repeat(4 - before.length % 4));
      } else if (event.key === "Enter" && !command && !event.isComposing) {
        event.preventDefault();
        const indent = before.match(/^ */)[0];
        this.insert("\n" + indent + (/:\s*(#.*)?$/.test(before) ? "    " : ""));
      } else if (event.key === "Backspace" && start === end && /^ +$/.test(before) && !command) {
        event.preventDefault();
        area.setSelectionRange(start - ((before.length - 1) % 4 + 1), start);
        document.execCommand("delete");
      } else if (command && event.key === "/") {
        event.preventDefault();
        this.eachLine((line) => /^\s*#/.test(line) ? line.replace(/^(\s*)# ?/, "$1")
          : line.replace(/^(\s*)(?=\S)/, "$1# "));
      }
      if (!["Shift", "Control", "Alt", "Meta"].includes(event.key)) this.leave = false;
    }
  };
})();
