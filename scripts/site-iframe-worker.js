// SPDX-License-Identifier: Apache-2.0
// Browsers refuse workers to pages that are opened as files: there, the search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<script>window.postMessage = m => parent.siteWorker(m);"
        + "window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise("
        + "(done, failed) => {"
        + "const s = document.createElement('script'); s.src = url; s.onload = done; s.onerror = failed;"
        + "document.body.append(s); })), Promise.resolve());"
        + "</scr" + "ipt><body><script src=\"" + url + "\"></scr" + "ipt>";
      window.siteWorker = data => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.onload = () => {
        this.frame = frame;
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      };
      document.body.append(frame);
    }
    postMessage(data) {
      if (!this.frame) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame?.remove();
    }
  };
