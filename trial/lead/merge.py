import json,sys
R='/work/wt/dec/benchmarks/results/'
O=sys.argv[1]+'/'
def load(p): return json.load(open(p))
def dump(x,p): open(p,'w').write(json.dumps(x,indent=1)+'\n')
which=sys.argv[2:]
if 'pipeline' in which:
    w=load(R+'whole/nvidia-h200.json'); w['benchmarks'].update(load(O+'pipeline/pipeline/nvidia-h200.json')['benchmarks']); dump(w,R+'whole/nvidia-h200.json')
if 'decode' in which:
    w=load(R+'whole/nvidia-h200.json'); w['benchmarks']['language_model decode']=load(O+'decode/decode/nvidia-h200.json')['benchmarks']['language_model decode']; dump(w,R+'whole/nvidia-h200.json')
if 'quantized' in which:
    w=load(R+'nvidia-h200.json'); q=w['benchmarks']['quantized_table']; n=load(O+'quantized/quantized/nvidia-h200.json')['benchmarks']['quantized_table']
    key=lambda c:(c['case'],*c['shape'])
    new={key(c):c for c in n['cases']}
    q['cases']=[new.pop(key(c),c) for c in q['cases']]+list(new.values()); q['date']=n['date']; q['commit']=n['commit']
    dump(w,R+'nvidia-h200.json')
if 'parallel' in which:
    w=load(R+'parallel/nvidia-h200.json'); w['benchmarks'].pop('parallel',None); w['benchmarks'].update(load(O+'two49/nvidia-h200.json')['benchmarks']); dump(w,R+'parallel/nvidia-h200.json')
