'use strict';
// Answers / with a greeting, as JSON, after reading the whole body.

const crypto = require('node:crypto');
const http = require('node:http');

function answer(response, status, type, body) {
  // With its length known, head and body leave in one write.
  response.writeHead(status, { 'Content-Type': type, 'Content-Length': Buffer.byteLength(body) });
  response.end(body);
}

const server = http.createServer((request, response) => {
  const path = request.url.split('?', 1)[0];
  request.resume();
  request.on('end', () => {
    if (path === '/healthz') {
      answer(response, 200, 'text/plain', 'ok');
    } else if (path === '/') {
      const hello = { hello: 'world', runtime: process.version, random: Math.random(), uuid: crypto.randomUUID() };
      answer(response, 200, 'application/json', JSON.stringify(hello));
    } else {
      answer(response, 404, 'application/json', '{"error":"there is only /"}');
    }
  });
});

server.listen(Number(process.env.PORT || 8080), '0.0.0.0');
