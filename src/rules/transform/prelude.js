// Code can't be made from text: eval and the constructors of functions refuse.
(() => {
  const refuse = () => { throw new EvalError("code generation from strings is not allowed"); };
  globalThis.eval = refuse;
  const kinds = [function () {}, function* () {}, async function () {}, async function* () {}];
  for (const kind of kinds) {
    const prototype = Object.getPrototypeOf(kind);
    const constructor = function () { refuse(); };
    Object.defineProperty(constructor, "prototype", { value: prototype, writable: false });
    Object.defineProperty(prototype, "constructor", { value: constructor, writable: false, configurable: false });
  }
  globalThis.Function = Function.prototype.constructor;
})();
