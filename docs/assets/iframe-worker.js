// Search in pages that are opened as files. Browsers start no Web Worker from a file, but they load scripts from files
// in a frame: this stands in for Worker there, and does nothing where the pages come from a server. Its global name,
// IFrameWorker, is what the theme's search looks for. The theme would load a script like it from another site.
(function () {
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = []; // messages from before the script has loaded
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(inner, next)), Promise.resolve());
      load(inner, new URL(url, location.href).href).then(() => {
        const messages = this.waiting;
        this.waiting = null;
        messages.forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  }

  function load(inner, url) {
    return new Promise((resolve, reject) => {
      const script = inner.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${url} cannot be loaded.`));
      inner.document.body.appendChild(script);
    });
  }

  window.IFrameWorker = window.Worker = IFrameWorker;
})();
