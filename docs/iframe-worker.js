// Browsers start no web workers from file://. The site's search is such a worker, so on file:// it runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #ready;
    #window;

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.#window = frame.contentWindow;
      this.#window.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      this.#ready = new Promise((resolve) => script.addEventListener("load", resolve));
      frame.contentDocument.body.append(script);
    }

    async postMessage(data) {
      await this.#ready;
      this.#window.dispatchEvent(new this.#window.MessageEvent("message", { data }));
    }

    terminate() {
      this.#window.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
